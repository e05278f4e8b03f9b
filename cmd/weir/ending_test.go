// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
	"golang.org/x/sys/unix"
)

// promisedEnd bounds how long a command runs on after TERM.
const promisedEnd = 5 * time.Second

// stuckRole runs weir, announces a step of a change and then hangs there. With GO_ON it announces the step and goes on.
func stuckRole(args []string) error {
	kerneltest.OnStep(func(step string) {
		if step == os.Getenv("STUCK_AT") {
			fmt.Println("stuck")
			if os.Getenv("GO_ON") == "" {
				select {}
			}
		}
	})
	main()
	return nil
}

// output collects a process's output. A test waits for a part of it.
type output struct {
	mu   sync.Mutex
	text strings.Builder
	more chan struct{}
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case o.more <- struct{}{}:
	default:
	}
	return o.text.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func (o *output) await(t *testing.T, part string) {
	t.Helper()
	late := time.After(time.Minute)
	for !strings.Contains(o.String(), part) {
		select {
		case <-o.more:
		case <-late:
			t.Fatalf("it does not say %q, but %q", part, o.String())
		}
	}
}

// ending is a command to be ended by TERM.
type ending struct {
	*exec.Cmd
	t    *testing.T
	said *output
}

// begin starts a command. Its standard output and error go to said unless they are redirected.
func begin(t *testing.T, c *exec.Cmd) *ending {
	t.Helper()
	e := &ending{Cmd: c, t: t, said: &output{more: make(chan struct{}, 1)}}
	if c.Stdout == nil {
		c.Stdout = e.said
	}
	if c.Stderr == nil {
		c.Stderr = e.said
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Process.Kill() })
	return e
}

// term sends TERM and checks that the command ends in time.
func (e *ending) term() {
	e.t.Helper()
	start := time.Now()
	if err := e.Process.Signal(syscall.SIGTERM); err != nil {
		e.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); e.Wait() }()
	select {
	case <-done:
		took := time.Since(start)
		e.t.Logf("ended after %s: %v", took.Round(time.Millisecond), e.ProcessState)
		if took > promisedEnd {
			e.t.Errorf("it took %s to end", took)
		}
	case <-time.After(4 * promisedEnd):
		e.t.Errorf("not ended %s after TERM; it said %q", 4*promisedEnd, e.said)
	}
}

// blocked waits until a process blocks in a system call.
func (e *ending) blocked(call int) {
	e.t.Helper()
	nstest.Eventually(e.t, func() error {
		all, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", e.Process.Pid))
		for _, path := range all {
			b, _ := os.ReadFile(path)
			if strings.HasPrefix(string(b), fmt.Sprint(call, " ")) {
				return nil
			}
		}
		return fmt.Errorf("it waits in no system call %d; it said %q", call, e.said)
	})
}

// silent returns a socket with an accept loop and no answers. came reports each connection.
func silent(t *testing.T, network string) (path string, came chan struct{}) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "silent.sock")
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	for dir := filepath.Dir(path); dir != os.TempDir(); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	came = make(chan struct{}, 100)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
			came <- struct{}{}
		}
	}()
	return path, came
}

// full returns a full pipe without a reader.
func full(t *testing.T) *os.File {
	t.Helper()
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := unix.Write(p[1], make([]byte, 4096)); err != nil {
			break
		}
	}
	if err := unix.SetNonblock(p[1], false); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(p[0]) })
	w := os.NewFile(uintptr(p[1]), "pipe")
	t.Cleanup(func() { w.Close() })
	return w
}

// Every command ends within 5 s of TERM, even while it waits.
func TestCommandsEnd(t *testing.T) {
	listen(t)
	config := func(t *testing.T) string { return configFile(t, "") }
	fifo := func(t *testing.T) string {
		path := filepath.Join(t.TempDir(), "fifo")
		if err := unix.Mkfifo(path, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, c := range []struct {
		name string
		at   func(t *testing.T, dir string) *ending // a waiting command
	}{
		{"serve with clients that do not answer", func(t *testing.T, dir string) *ending {
			sockets := t.TempDir()
			at := func(name string) string { return filepath.Join(sockets, name) }
			e := begin(t, command("--root", dir, "serve", "--listen", "127.0.0.1:9843", "--socket", at("weir.sock")))
			e.said.await(t, "keeping sessions")
			for path, network := range map[string]string{"127.0.0.1:9843": "tcp", at("weir.sock"): "unix", at("register.sock"): "unix", at("handoff.sock"): "unixpacket"} {
				for range 5 {
					conn, err := net.Dial(network, path)
					if err != nil {
						t.Fatal(path, err)
					}
					t.Cleanup(func() { conn.Close() })
					conn.Write([]byte("GET /metrics HTTP/1.1\r\nHost: x\r\n")) // an unfinished request; the keeper gets no message at all
				}
			}
			return e
		}},
		{"serve as it starts", func(t *testing.T, dir string) *ending {
			return begin(t, command("--root", dir, "serve", "--listen", "", "--socket", filepath.Join(t.TempDir(), "weir.sock")))
		}},
		{"serve that has begun to answer", func(t *testing.T, dir string) *ending {
			e := begin(t, command("--root", dir, "serve", "--listen", "", "--socket", filepath.Join(t.TempDir(), "weir.sock")))
			e.said.await(t, "answering the group")
			return e
		}},
		{"serve at a step of its own", func(t *testing.T, dir string) *ending {
			session{t, dir}.run(0, ".*", "apply", "-f", config(t), "--allow-outage")
			e := stuckAt(t, dir, "serve", "--listen", "", "--socket", filepath.Join(t.TempDir(), "weir.sock"))
			return e
		}},
		{"keeper with clients that do not answer", func(t *testing.T, dir string) *ending {
			path := filepath.Join(t.TempDir(), "handoff.sock")
			c := command("handoff", "keep")
			c.Env = append(c.Env, "WEIR_HANDOFF_SOCKET="+path)
			e := begin(t, c)
			e.said.await(t, "keep")
			for range 20 {
				conn, err := net.Dial("unixpacket", path)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { conn.Close() })
			}
			return e
		}},
		{"daemon whose supervisor is sent the signal", func(t *testing.T, dir string) *ending {
			session{t, dir}.run(0, ".*", "apply", "-f", config(t), "--allow-outage")
			e := begin(t, command("--root", dir, "steer", "run", "telemetry", "--slot", "1", "--", "/bin/sh", "-c", "echo running; while :; do sleep 0.1; done"))
			e.said.await(t, "running")
			return e
		}},
		{"serve whose log nobody reads", func(t *testing.T, dir string) *ending {
			c := command("--root", dir, "serve", "--listen", "", "--socket", filepath.Join(t.TempDir(), "weir.sock"))
			c.Stderr = full(t)
			e := begin(t, c)
			e.blocked(unix.SYS_WRITE)
			return e
		}},
		{"apply of a file that is a FIFO", func(t *testing.T, dir string) *ending {
			e := begin(t, command("--root", dir, "apply", "-f", fifo(t)))
			e.blocked(unix.SYS_OPENAT)
			return e
		}},
		{"replace of an input without end", func(t *testing.T, dir string) *ending {
			c := command("--root", dir, "bind", "replace", "-")
			in, err := c.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { in.Close() })
			e := begin(t, c)
			e.blocked(unix.SYS_READ)
			return e
		}},
		{"apply at a step", func(t *testing.T, dir string) *ending {
			return stuckAt(t, dir, "apply", "-f", config(t), "--allow-outage")
		}},
		{"status of a serve that does not answer", func(t *testing.T, dir string) *ending {
			path, came := silent(t, "unix")
			c := command("--socket", path, "status")
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			e := begin(t, c)
			<-came
			return e
		}},
		{"handoff status of a keeper that does not answer", func(t *testing.T, dir string) *ending {
			path, came := silent(t, "unixpacket")
			c := command("handoff", "status")
			c.Env = append(c.Env, "WEIR_HANDOFF_SOCKET="+path)
			e := begin(t, c)
			<-came
			return e
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := root(t)
			c.at(t, dir).term()
		})
	}
	// All writers, while another process holds the lock.
	dir := root(t)
	l, err := kernel.OpenRoot(dir).Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Unlock() })
	for _, args := range [][]string{
		{"apply", "-f", config(t)}, {"remove"}, {"upgrade"}, {"bypass", "--all"},
		{"bind", "add", "www", "udp", "192.0.2.1", "53"},
	} {
		t.Run(strings.Join(args[:1], " ")+" waits for the lock", func(t *testing.T) {
			t.Parallel()
			e := begin(t, command(append([]string{"--root", dir}, args...)...))
			e.said.await(t, "wait")
			e.term()
		})
	}
}

// stuckAt starts a command that hangs at its first step.
func stuckAt(t *testing.T, dir string, args ...string) *ending {
	t.Helper()
	return stuckAtStep(t, dir, "publish:staged", args...)
}

// stuckAtStep starts a command that hangs at a step.
func stuckAtStep(t *testing.T, dir, step string, args ...string) *ending {
	t.Helper()
	c := nstest.Child("stuck", anys(append([]string{"--root", dir}, args...))...)
	c.Dir, c.Env = "/", append(c.Env, "STUCK_AT="+step)
	e := begin(t, c)
	e.said.await(t, "stuck")
	return e
}

// during starts a command and returns once it has passed a step.
func during(t *testing.T, dir, step string, args ...string) *ending {
	t.Helper()
	c := nstest.Child("stuck", anys(append([]string{"--root", dir}, args...))...)
	c.Dir, c.Env = "/", append(c.Env, "STUCK_AT="+step, "GO_ON=1")
	e := begin(t, c)
	e.said.await(t, "stuck")
	return e
}

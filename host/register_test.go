// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/register"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/internal/nstest"
)

// playCollector is a collector that registers itself for a service and slot, with UDP and TCP sockets at an address, or
// without sockets.
func playCollector(f []string) error {
	service, slot, addr := f[0], f[1], f[2]
	if addr != "-" {
		p, err := net.ListenPacket("udp4", addr)
		if err != nil {
			return err
		}
		defer p.Close()
		var lc net.ListenConfig
		lc.SetMultipathTCP(false)
		l, err := lc.Listen(context.Background(), "tcp4", addr)
		if err != nil {
			return err
		}
		defer l.Close()
	}
	n, err := strconv.Atoi(slot)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	if addr != "-" {
		ctx, cancel = context.WithTimeout(context.Background(), time.Minute)
	}
	defer cancel()
	if err := register.Slot(ctx, service, n); err != nil {
		return fmt.Errorf("refused=%v serve=%v: %w", errors.Is(err, register.ErrRefused), !errors.Is(err, register.ErrNoServe), err)
	}
	fmt.Println("registered")
	io.Copy(io.Discard, os.Stdin)
	return nil
}

// asCollector is a playCollector for a service, a slot and an address.
func asCollector(f string) *exec.Cmd {
	c := nstest.Child("collector")
	c.Args = append(c.Args, strings.Fields(f)...)
	c.Dir = "/"
	return c
}

// collector runs a program as a user and returns its first line of output.
func (s *serving) collector(uid uint32, c *exec.Cmd) (line string, pid int, end func()) {
	t := s.w.t
	t.Helper()
	c.Env = append(c.Env, "WEIR_REGISTER_SOCKET="+s.register)
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stderr = c.Stdout
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	end = func() { in.Close(); c.Process.Kill(); c.Wait() }
	t.Cleanup(end)
	line, _ = bufio.NewReader(out).ReadString('\n')
	return strings.TrimSpace(line), c.Process.Pid, end
}

// slotIs waits until a slot is held by a process, or empty if pid is 0.
func (w world) slotIs(slot, pid int) {
	w.t.Helper()
	nstest.Eventually(w.t, func() error {
		now := w.state().Services[0].Slots[slot]
		if now.Admitted() == (pid != 0) && (pid == 0 || now.PID == pid) {
			return nil
		}
		return fmt.Errorf("slot %d is %+v, want process %d", slot, now, pid)
	})
}

func (w world) withdraw(slot int) {
	w.t.Helper()
	l, err := w.Root.Lock(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	defer l.Unlock()
	s := w.state().Services[0]
	if err := engine.Withdraw(l, slots.Slot{Scope: s.Scope(), Service: s.Name, Slot: slot}); err != nil {
		w.t.Fatal(err)
	}
}

const registering = `
services:
  telemetry:
    listen: [udp 127.0.0.1:4739, tcp 127.0.0.1:4739]
    steer: {slots: 4}
    members:
      - {slot: 0, user: "65534"}
      - {slot: 1, pidfile: %s}
      - {slot: 3, user: "65534", bound: [udp 127.0.0.1:4747, tcp 127.0.0.1:4747]}
`

func TestCollectorRegistersItself(t *testing.T) {
	w := newWorld(t)
	pidfile := filepath.Join(t.TempDir(), "pid")
	w.apply(w.config(registering, pidfile))
	s := w.serve()
	line, pid, end := s.collector(nobody, asCollector("telemetry 0 127.0.0.1:4739"))
	if line != "registered" {
		t.Fatal(line)
	}
	w.slotIs(0, pid)
	// It keeps its slot over another apply and a restart of weir serve.
	if did := w.apply(w.config(registering, pidfile)); !strings.Contains(fmt.Sprint(did), "slot 1") || strings.Contains(fmt.Sprint(did), "slot 0") {
		t.Errorf("apply did %q", did)
	}
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	w.slotIs(0, pid)
	s = w.serve()
	w.slotIs(0, pid)
	end()
	w.slotIs(0, 0)
	// Its sockets may be elsewhere: the configuration names the address.
	line, pid, end = s.collector(nobody, asCollector("telemetry 3 127.0.0.1:4747"))
	if line != "registered" {
		t.Error(line)
	}
	w.slotIs(3, pid)
	end()
	w.slotIs(3, 0)
}

func TestRegistrationIsRefused(t *testing.T) {
	w := newWorld(t)
	pidfile := filepath.Join(t.TempDir(), "pid")
	w.apply(w.config(registering, pidfile))
	s := w.serve()
	for _, c := range []struct {
		uid  uint32
		role string
		want string
	}{
		{4242, "telemetry 0 127.0.0.1:4739", "refused=true serve=true: weir serve: refused: user 4242 may not register for slot 0 of telemetry"},
		{nobody, "telemetry 1 127.0.0.1:4739", "user 65534 may not register for slot 1"},
		{nobody, "telemetry 2 127.0.0.1:4739", "user 65534 may not register for slot 2"},
		{nobody, "telemetry 4 127.0.0.1:4739", "no such slot: telemetry has slots 0 to 3"},
		{nobody, "telemetry -1 127.0.0.1:4739", "no such slot"},
		{nobody, "dns 0 127.0.0.1:4739", `service "dns": not there`},
		{nobody, "@lookup 0 127.0.0.1:4739", `service "@lookup": not there`},
		{nobody, "telemetry 0 -", "refused=false serve=true: weir serve: slot 0 of telemetry stays empty: process"},
	} {
		if line, _, end := s.collector(c.uid, asCollector(c.role)); !strings.Contains(line, c.want) {
			t.Errorf("%d, %s: %s", c.uid, c.role, line)
		} else {
			end()
		}
	}
	// Root may register for every slot.
	if line, pid, end := s.collector(0, asCollector("telemetry 2 127.0.0.1:4739")); line != "registered" {
		t.Error(line)
	} else {
		w.slotIs(2, pid)
		end()
	}
	w.withdraw(0)
	if line, _, _ := s.collector(nobody, asCollector("telemetry 0 127.0.0.1:4739")); !strings.Contains(line, "withdrawn by weir steer withdraw") {
		t.Errorf("a withdrawn slot: %s", line)
	}
	s.stop()
	if line, _, _ := s.collector(nobody, asCollector("telemetry 0 127.0.0.1:4739")); !strings.Contains(line, "serve=false: no weir serve answers on "+s.register) {
		t.Errorf("without weir serve: %s", line)
	}
}

// A command may change a slot while a registration waits for its check. The registration has no right to the slot then.
func TestRegistrationDuringChange(t *testing.T) {
	const text = `
services:
  telemetry:
    listen: [udp 127.0.0.1:4739, tcp 127.0.0.1:4739]
    steer: {slots: 1}
    members: [{slot: 0, user: "%d", ready: {command: [/bin/sh, -c, 'touch "$0/asked"; test -e "$0/ready"', %s], interval: 10ms, timeout: 1m}}]
`
	for name, c := range map[string]struct {
		command func(w world, dir string)
		want    string
	}{
		"user changed": {func(w world, dir string) { w.apply(w.config(text, nobody-1, dir)) }, "user 65534 may not register for slot 0"},
		"withdrawn":    {func(w world, _ string) { w.withdraw(0) }, "withdrawn by weir steer withdraw"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			dir, err := os.MkdirTemp("", "ready") // the check runs as the collector's user
			if err == nil {
				t.Cleanup(func() { os.RemoveAll(dir) })
				err = os.Chmod(dir, 0o777)
			}
			if err != nil {
				t.Fatal(err)
			}
			w.apply(w.config(text, nobody, dir))
			s := w.serve()
			answer := make(chan string, 1)
			go func() {
				line, _, _ := s.collector(nobody, asCollector("telemetry 0 127.0.0.1:4739"))
				answer <- line
			}()
			nstest.Eventually(t, func() error { _, err := os.Stat(dir + "/asked"); return err })
			c.command(w, dir)
			if err := os.WriteFile(dir+"/ready", nil, 0o644); err != nil {
				t.Fatal(err)
			}
			if line := <-answer; !strings.Contains(line, c.want) {
				t.Errorf("the answer is %q, want %q", line, c.want)
			}
			w.slotIs(0, 0)
		})
	}
}

// All users may connect to the socket for collectors, without reading anything there.
func TestRegisterSocketReadsNothing(t *testing.T) {
	w := newWorld(t)
	w.apply(w.config(registering, "/nonexistent"))
	s := w.serve()
	for path, want := range map[string]os.FileMode{s.socket: 0o660, s.register: 0o666} {
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", path, st, err)
		}
	}
	c := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", s.register)
	}}}
	for _, path := range []string{"/metrics", "/healthz", "/v1/steer/status", "/v1/steer/devices", "/v1/steer/where"} {
		resp, err := c.Get("http://weir" + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %s", path, resp.Status)
		}
	}
	for body, want := range map[string]string{"": "want service=NAME&slot=NUMBER", "service=telemetry&slot=x": "want service=", "slot=0": "want service=",
		"service=" + strings.Repeat("x", 8000): "want service="} {
		resp, err := c.Post("http://weir/v1/register", "application/x-www-form-urlencoded", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(b), want) {
			t.Errorf("%.40q: %s %s", body, resp.Status, b)
		}
	}
}

// The examples are built and run unchanged.
func TestRegisterExamples(t *testing.T) {
	nstest.NeedRoot(t)
	for name, build := range map[string]func(t *testing.T, out string) *exec.Cmd{
		"c": func(t *testing.T, out string) *exec.Cmd {
			cc, err := exec.LookPath("cc")
			if err != nil {
				t.Skip("need: tool cc (Debian package gcc)")
			}
			return exec.Command(cc, "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-I../clients/c", "-o", out, "../examples/register-c/collector.c")
		},
		"go": func(t *testing.T, out string) *exec.Cmd {
			tool, err := exec.LookPath("go")
			if err != nil {
				t.Skip("need: tool go")
			}
			return exec.Command(tool, "build", "-o", out, "../examples/register-go")
		},
	} {
		t.Run(name, func(t *testing.T) {
			program := filepath.Join(socketDir(t), "collector")
			if out, err := build(t, program).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			w := newWorld(t)
			w.apply(w.config("services:\n  telemetry:\n    listen: [udp 0.0.0.0:4739]\n    members: [{slot: 0, user: nobody}]\n"))
			s := w.serve()
			c := exec.Command(program)
			c.Env = os.Environ()
			line, pid, end := s.collector(nobody, c)
			if line != "registered" {
				t.Fatal(line)
			}
			w.slotIs(0, pid)
			end()
			w.slotIs(0, 0)
			c = exec.Command(program)
			c.Env = os.Environ()
			line, _, end = s.collector(4242, c)
			if !strings.Contains(line, "refused: user 4242 may not register") {
				t.Error(line)
			}
			end() // its port must be free
			impostor := filepath.Join(socketDir(t), "register.sock")
			if err := os.Chmod(filepath.Dir(impostor), 0o777); err != nil {
				t.Fatal(err)
			}
			nstest.AsUser(t, 4242, func() error {
				l, err := net.Listen("unix", impostor)
				if err != nil {
					return err
				}
				t.Cleanup(func() { l.Close() })
				return os.Chmod(impostor, 0o666)
			})
			s.register = impostor
			c = exec.Command(program)
			c.Env = os.Environ()
			if line, _, _ := s.collector(nobody, c); !strings.Contains(line, "neither root nor this user: set $WEIR_REGISTER_UID") {
				t.Errorf("another user's socket: %s", line)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The daemon gets its arguments and sockets, and the command returns the daemon's exit status.
func TestRunPassesStatusAndSockets(t *testing.T) {
	s := session{t, root(t)}
	file := configFile(t, "")
	s.run(0, `create .*`, "apply", "-f", file, "--allow-outage")
	run := func(args ...string) []string {
		return append([]string{"steer", "run", "telemetry", "--slot", "1"}, args...)
	}
	s.run(7, `.*`, run("--", "sh", "-c", "exit 7")...)
	s.run(0, `.*`, run("--", "true")...)
	s.run(128+int(syscall.SIGKILL), `.*`, run("--", "sh", "-c", "kill -9 $$")...)
	s.run(1, `weir: start /nonexistent/daemon: fork/exec /nonexistent/daemon: no such file or directory\n`, run("--", "/nonexistent/daemon")...)
	s.run(0, `2 sockets udp-4739:tcp-4739 for yes in 65534 /\n.*`, run("--listen-fds", "--user", "nobody", "--env", "WEIR_NSTEST_ROLE", "--", "sh", "-c",
		`me=no; [ "$LISTEN_PID" = $$ ] && me=yes; echo "$LISTEN_FDS sockets $LISTEN_FDNAMES for $me in $(id -u) $(pwd)"; exec sleep 0.3`)...)
	s.run(127, `.*weir: .*/nonexistent/daemon.*no such file.*`, run("--listen-fds", "--", "/nonexistent/daemon")...)
	s.run(1, `weir: user: unknown user nobody-of-that-name\n`, run("--user", "nobody-of-that-name", "--", "true")...)
	s.run(2, `weir: name the slot: --slot N\n`, "steer", "run", "telemetry", "--", "true")
	s.run(1, `weir: no such slot: telemetry has slots 0 to 1\n`, "steer", "run", "telemetry", "--slot", "2", "--", "true")
	s.run(1, `weir: service "dns" is not steered \(steered: telemetry\)\n`, "steer", "run", "dns", "--slot", "0", "--", "true")
}

// Signals reach the daemon, and the command ends with it.
func TestRunForwardsSignals(t *testing.T) {
	s := session{t, root(t)}
	s.run(0, `create .*`, "apply", "-f", configFile(t, ""), "--allow-outage")
	c := command("--root", s.root, "steer", "run", "telemetry", "--slot", "1", "--restart", "--", "sh", "-c",
		`for s in HUP USR1 USR2; do trap "echo $s" $s; done; trap "exit 5" TERM; echo up; while :; do read x; done`)
	in, w, err := os.Pipe() // input of the waiting daemon
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	defer in.Close()
	c.Stdin = in
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer c.Process.Kill()
	lines := bufio.NewScanner(out)
	want := func(line string) {
		t.Helper()
		if !lines.Scan() || strings.TrimSpace(lines.Text()) != line {
			t.Fatalf("it says %q, want %q", lines.Text(), line)
		}
	}
	want("up")
	// sh runs a trap only after read returns. weir may forward the signal only after the accompanying line.
	ended := make(chan struct{})
	go func() {
		for {
			select {
			case <-ended:
				return
			case <-time.After(20 * time.Millisecond):
				fmt.Fprintln(w)
			}
		}
	}()
	defer close(ended)
	for name, sig := range map[string]syscall.Signal{"HUP": syscall.SIGHUP, "USR1": syscall.SIGUSR1, "USR2": syscall.SIGUSR2} {
		c.Process.Signal(sig)
		want(name)
	}
	c.Process.Signal(syscall.SIGTERM)
	c.Wait()
	if got := c.ProcessState.ExitCode(); got != 5 {
		t.Errorf("it ended with %d, want 5", got)
	}
}

// A daemon ended by a forwarded signal, as in systemctl stop, has ended well.
func TestRunEndsLikeTheDaemon(t *testing.T) {
	s := session{t, root(t)}
	s.run(0, `create .*`, "apply", "-f", configFile(t, ""), "--allow-outage")
	c := command("--root", s.root, "steer", "run", "telemetry", "--slot", "1", "--", "sh", "-c", "echo up; exec sleep 1000")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer c.Process.Kill()
	if lines := bufio.NewScanner(out); !lines.Scan() {
		t.Fatal("the daemon says nothing")
	}
	c.Process.Signal(syscall.SIGTERM)
	c.Wait()
	if ws, ok := c.ProcessState.Sys().(syscall.WaitStatus); !ok || !ws.Signaled() || ws.Signal() != syscall.SIGTERM {
		t.Errorf("it ended with %v, want SIGTERM", c.ProcessState)
	}
}

// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// roleEnv is the environment variable with the role of a process of the test binary.
const roleEnv = "WEIR_NSTEST_ROLE"

// Role is the function of the test binary in another process.
type Role func(args []string) error

// Play plays a role if this process is a [Child], and exits. If the role fails, it prints the error
// on standard error and exits with status 1. If the role executes this binary again, the new
// process plays the same role, like a command starting itself. In any other process Play returns.
// Use it as
//
//	func TestMain(m *testing.M) { nstest.Play(map[string]nstest.Role{"daemon": daemon}); nstest.Main(m) }
func Play(roles map[string]Role) {
	name := os.Getenv(roleEnv)
	if name == "" {
		return
	}
	role, ok := roles[name]
	if !ok {
		role, ok = ownRoles[name]
	}
	if !ok {
		fmt.Fprintf(os.Stderr, "nstest: no role %q\n", name)
		os.Exit(1)
	}
	if err := role(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Child prepares another process of this binary. It [Play]s a role with the arguments as printed by
// fmt. It has no death signal, because that depends on the starting thread, and namespace calls use
// up threads. Long-lived roles end with their standard input instead.
func Child(role string, args ...any) *exec.Cmd {
	c := exec.Command("/proc/self/exe")
	for _, a := range args {
		c.Args = append(c.Args, fmt.Sprint(a))
	}
	// With the race detector each process would sleep a second before it exits.
	c.Env = append(os.Environ(), "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0", roleEnv+"="+role)
	c.SysProcAttr = &syscall.SysProcAttr{}
	return c
}

// Process is a running child that exchanges lines with the test.
type Process struct {
	*exec.Cmd
	t    testing.TB
	in   io.WriteCloser
	out  *bufio.Scanner
	wait func() error
}

// Start starts a child that ends with its standard input, at the latest at the end of the test.
func Start(t testing.TB, c *exec.Cmd) *Process {
	t.Helper()
	if c.Stderr == nil {
		c.Stderr = os.Stderr
	}
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatalf("nstest: %v", err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatalf("nstest: %v", err)
	}
	if err := c.Start(); err != nil {
		t.Fatalf("nstest: %v", err)
	}
	p := &Process{Cmd: c, t: t, in: in, out: bufio.NewScanner(out), wait: sync.OnceValue(c.Wait)}
	t.Cleanup(p.Kill)
	return p
}

// StartReady starts a child and waits for its line "ready".
func StartReady(t testing.TB, c *exec.Cmd) *Process {
	t.Helper()
	p := Start(t, c)
	p.Expect("ready")
	return p
}

// PID returns the child's process id.
func (p *Process) PID() int { return p.Process.Pid }

// Line waits for the child's next line. ok is false if the child has ended.
func (p *Process) Line() (line string, ok bool) {
	ok = p.out.Scan()
	return p.out.Text(), ok
}

// Expect waits for the child's next line and fails unless it is want.
func (p *Process) Expect(want string) {
	p.t.Helper()
	if line, ok := p.Line(); !ok {
		p.t.Fatalf("child %s ended before printing %q: %v", strings.Join(p.Args[1:], " "), want, p.Wait())
	} else if line != want {
		p.t.Fatalf("child %s printed %q, want %q", strings.Join(p.Args[1:], " "), line, want)
	}
}

// Tell writes a line to the child.
func (p *Process) Tell(line string) {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.in, line); err != nil {
		p.t.Fatalf("write to child %s: %v", strings.Join(p.Args[1:], " "), err)
	}
}

// CloseInput tells the child to end and does not wait.
func (p *Process) CloseInput() { p.in.Close() }

// End tells the child to end and waits. A second call does nothing.
func (p *Process) End() error {
	p.CloseInput()
	return p.Wait()
}

// Kill ends the child like a crash and waits.
func (p *Process) Kill() {
	_ = p.Process.Kill() // may have ended
	_ = p.Wait()
}

// Wait waits until the child has ended and returns its result.
func (p *Process) Wait() error { return p.wait() }

// Signal sends a signal to the child.
func (p *Process) Signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.Process.Signal(s); err != nil {
		p.t.Fatalf("nstest: %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// TestProbeRefusesWithoutDescriptors checks that a member without free descriptors rejects an
// offered session with a reason and stays connected. The session goes back.
func TestProbeRefusesWithoutDescriptors(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{})
			p := w.probe("0", w.address, command...)
			w.connect(p)
			address := freeAddress(t)
			other := w.probe("1", address, command...)
			there := *w
			there.address = address
			there.connect(other)
			for refused, size := range []string{"16", "100000"} { // the second one uses a memfd
				p.want("files 5", "0")
				other.want(fmt.Sprintf("transfer %d %s 0", refused, size), "0")
				p.want("accept 300", "0")
				p.want("commit 0 16", "0")
				p.want("files 100", "0")
				other.want("accept 30000", "1")
				s := w.sessions("session")
				if len(s) != 2 || !strings.Contains(s[0].ReturnReason+s[1].ReturnReason, "RLIMIT_NOFILE") {
					t.Errorf("%+v", s)
				}
			}
			if n := w.counts(); n.Kept != 4 || n.Rejected != 2 { // two listeners and two sessions, once each
				t.Errorf("%+v", n)
			}
		})
	}
}

// TestProbeNoMemory checks that a connection waits while there is no memory.
func TestProbeNoMemory(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	p := w.probe("0", w.address, probes(t)["c"]...)
	p.want("poor 1", "0")
	c, err := net.Dial("tcp", w.address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, _ := p.says(patience, "accept 3000"); !strings.Contains(got, "no memory") {
		t.Errorf("without memory: %s", got)
	}
	p.want("poor 0", "0")
	p.want("accept 3000", "1")
}

// TestProbeJoinsInVain checks that failed joins and double leaves leak no descriptor and close no
// other one.
func TestProbeJoinsInVain(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{})
			p := w.probe("0", w.address, command...)
			p.want("failing 20", "0")
			if language == "python" {
				p.want("reclose 0", "0")
			}
			w.connect(p)
		})
	}
}

// cpuTime returns the CPU time used by a process.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+2:]))
	var user, system int
	fmt.Sscan(f[11], &user)
	fmt.Sscan(f[12], &system)
	return time.Duration(user+system) * 10 * time.Millisecond // ticks of USER_HZ
}

// TestForeignWithoutDescriptors checks that the example servers wait for descriptors without
// spinning. They serve their existing clients meanwhile, and the waiting ones afterwards.
func TestForeignWithoutDescriptors(t *testing.T) {
	for language, command := range languages(t) {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{})
			p := w.foreign("0", w.address, command...)
			first, err := net.Dial("tcp", w.address)
			if err != nil {
				t.Fatal(err)
			}
			defer first.Close()
			nstest.Until(t, "the first is kept", func() bool { return len(w.sessions("session")) == 1 })
			free := 0 // the number of the next descriptor
			for ; err == nil; free++ {
				_, err = os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", p.PID(), free))
			}
			limit := func(n int) {
				if err := unix.Prlimit(p.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(n), Max: 4096}, nil); err != nil {
					t.Fatal(err)
				}
			}
			limit(free - 1)
			waits := w.client()
			waits.run()
			before := cpuTime(t, p.PID())
			nstest.Steadily(t, 1500*time.Millisecond, func() error {
				if used := cpuTime(t, p.PID()) - before; used > 500*time.Millisecond {
					return fmt.Errorf("%v of CPU", used)
				}
				return nil
			})
			first.SetDeadline(time.Now().Add(patience))
			if _, err := first.Write([]byte("1234567")); err != nil {
				t.Error(err)
			}
			if n, err := io.ReadFull(first, make([]byte, answer)); err != nil {
				t.Errorf("%d bytes, %v", n, err)
			}
			limit(1000)
			waits.finish()
		})
	}
}

// TestPythonPendingMoved checks that the Python server ends a moved session with unread data left,
// instead of waiting for ever.
func TestPythonPendingMoved(t *testing.T) {
	needTools(t, "python3")
	const script = `
import socket, talk
class Session:
    pending, id, state, closed = 7, 1, None, False
    def __init__(self): self.socket = socket.socket()
    def fileno(self): return self.socket.fileno()
    def recv(self, n):
        from weir_handoff import Moved
        raise Moved()
    def close(self): print("closed", flush=True)
class Member:
    def __init__(self, *args, **more): self.sessions, self.socket = [Session()], socket.socket()
    def listen(self, *args): pass
    def fileno(self): return self.socket.fileno()
    def accept(self, timeout):
        if self.sessions:
            return self.sessions.pop()
        raise talk.Replaced()
    def close(self): pass
talk.Member = Member
talk.main("", "0", "1")
`
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := exec.CommandContext(ctx, "python3", "-c", script)
	c.Env = append(os.Environ(), "PYTHONPATH="+clients+"python", "PYTHONDONTWRITEBYTECODE=1")
	in, err := c.StdinPipe() // a pipe, because a selector accepts it
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if b, err := c.CombinedOutput(); err != nil || !strings.Contains(string(b), "closed") {
		t.Errorf("%v\n%s", err, b)
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// probe is a member in C or Python that obeys orders: testdata/probe.c.
type probe struct {
	*nstest.Process
	t testing.TB
}

var compileProbe = compiled("-I", clients+"c", "testdata/probe.c")

// probes returns the commands of both, to be completed by KEEPER NAME PORT.
func probes(t testing.TB) map[string][]string {
	t.Helper()
	needTools(t, "gcc", "python3")
	out := program(t, "probe", compileProbe)
	python, err := filepath.Abs(clients + "python")
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]string{"c": {out}, "python": {"env", "PYTHONPATH=" + python, "PYTHONDONTWRITEBYTECODE=1", "python3", "testdata/probe.py"}}
}

func (w *world) probe(name, address string, command ...string) *probe {
	w.t.Helper()
	return &probe{w.foreign(name, address, command...), w.t}
}

// says gives the probe an order with a time limit. It returns the result and the duration reported
// by the probe.
func (p *probe) says(within time.Duration, order string) (result string, took time.Duration) {
	p.t.Helper()
	p.Tell(order)
	stuck := time.AfterFunc(within, p.Kill)
	line, ok := p.Line()
	if !stuck.Stop() || !ok {
		p.t.Fatalf("%q has not ended within %v: %q", order, within, line)
	}
	rest, found := strings.CutPrefix(line, strings.Fields(order)[0]+" ")
	at := strings.LastIndex(strings.TrimSuffix(rest, " ms"), " ")
	if !found || at < 0 {
		p.t.Fatalf("%q is answered by %q", order, line)
	}
	took, err := time.ParseDuration(strings.TrimSuffix(rest[at+1:], " ms") + "ms")
	if err != nil {
		p.t.Fatal(err)
	}
	return rest[:at], took
}

// want gives an order and checks its result.
func (p *probe) want(order, result string) {
	p.t.Helper()
	if got, _ := p.says(patience, order); got != result {
		p.t.Fatalf("%q: %q, want %q", order, got, result)
	}
}

// connect returns a connection accepted by the probe.
func (w *world) connect(p *probe) net.Conn {
	w.t.Helper()
	c, err := net.Dial("tcp", w.address)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	p.want("accept 30000", "1")
	return c
}

// TestProbeSignals checks that signals at any time hang no member in C.
func TestProbeSignals(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	p := w.probe("0", w.address, probes(t)["c"]...)
	if got, _ := p.says(patience, "storm 3000"); got != "0" {
		t.Error(got)
	}
	address := freeAddress(t)
	other := w.probe("1", address, probes(t)["c"]...)
	w.connect(p)
	for _, x := range []*probe{p, other} {
		x.want("signals 200", "0")
	}
	accept := func(x *probe) { // a signal ends an accept
		t.Helper()
		nstest.Until(t, "the session has arrived", func() bool { got, _ := x.says(patience, "accept 30000"); return got == "1" })
	}
	at, next := p, other
	for i, to := range []string{"1", "0", "1", "0", "1", "0"} {
		session := fmt.Sprint(i / 2)
		at.want("flood "+session+" 2000", "0")
		at.want("commit "+session+" 200000", "0") // in a memfd
		at.want("transfer "+session+" 200000 "+to, "0")
		accept(next)
		at, next = next, at
	}
	if n := w.counts(); n.Transfers != 6 || n.Gaps+n.Closed+n.Rejected > 0 || n.Kept != 3 {
		t.Errorf("%+v", n)
	}
}

// keepers are successive keepers at one address, for members that outlive them.
type keepers struct {
	*world
	end func()
}

func newKeepers(t testing.TB) *keepers {
	nstest.NeedRoot(t)
	k := &keepers{world: &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}}
	k.start()
	t.Cleanup(func() { k.end() })
	return k
}

func (k *keepers) start() {
	k.t.Helper()
	k.keeper = keeper.New(keeper.Options{})
	l, err := keeper.Listen(k.socket)
	if err != nil {
		k.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- k.keeper.Serve(ctx, l) }()
	k.end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			k.t.Error(err)
		}
	})
}

// TestProbeAccept checks that accept takes exactly its timeout, with and without a keeper. A signal
// or a lack of descriptors ends it.
func TestProbeAccept(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			k := newKeepers(t)
			p := k.probe("0", k.address, command...)
			inTime := func(order, result string, want time.Duration) {
				t.Helper()
				if got, took := p.says(patience, order); got != result || took < want-10*time.Millisecond || took > want+5*time.Second {
					t.Errorf("%q: %q after %v, want %q after %v", order, got, took, result, want)
				}
			}
			if language == "c" { // Python's signal handlers raise exceptions themselves
				inTime("alarmed 300", "-1 EINTR", 300*time.Millisecond)
			}
			inTime("accept 1500", "0", 1500*time.Millisecond)
			k.connect(p)
			p.want("files 5", "0")
			c, err := net.Dial("tcp", k.address)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			inTime("accept 3000", "-1 EMFILE", 0)
			p.want("files 100", "0")
			inTime("accept 3000", "1", 0)
			k.end()
			inTime("accept 2500", "0", 2500*time.Millisecond)
			inTime("accept 0", "0", 0)
			if language == "c" {
				inTime("alarmed 300", "-1 EINTR", 300*time.Millisecond)
			}
		})
	}
}

// TestProbeStoppedKeeper checks that members wait for a stopped keeper once, for 2 s, and reconnect
// after it continues.
func TestProbeStoppedKeeper(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			nstest.NeedRoot(t)
			w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
			k := nstest.StartReady(t, nstest.Child("keeper", w.socket))
			p := w.probe("0", w.address, command...)
			w.connect(p)
			k.Signal(syscall.SIGSTOP)
			if got, took := p.says(patience, "flood 0 2000"); !strings.HasPrefix(got, "-1") || took < 1900*time.Millisecond || took > 4500*time.Millisecond {
				t.Errorf("%s after %v, want -1 after 2 s", got, took)
			}
			for range 3 { // during attempts to find another one
				if got, took := p.says(patience, "accept 700"); got != "0" || took > 5*time.Second {
					t.Errorf("%s after %v, want 0 after 700 ms", got, took)
				}
				if _, took := p.says(patience, "flood 0 10"); took > 1500*time.Millisecond {
					t.Errorf("commits without a keeper take %v", took)
				}
			}
			k.Signal(syscall.SIGCONT)
			nstest.Until(t, "the session is kept again", func() bool {
				p.says(patience, "accept 100")
				got, _ := p.says(patience, "commit 0 16")
				return got == "0"
			})
		})
	}
}

// TestProbeFailedDeployment starts a newer process that finds the listener and dies before it is
// ready. The older one still gets sessions, and the next one finds the listener.
func TestProbeFailedDeployment(t *testing.T) {
	commands := probes(t)
	for language, command := range commands {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{Hold: time.Second})
			p := w.probe("0", w.address, command...)
			w.connect(p)
			p.want("commit 0 16", "0")
			_, port, _ := net.SplitHostPort(w.address)
			failing := exec.Command(commands["c"][0], w.socket, "0", port)
			failing.Env = append(os.Environ(), "PROBE_FAILS=1")
			if err := failing.Run(); failing.ProcessState.ExitCode() != 1 {
				t.Fatal(err)
			}
			p.want("accept 4000", "0") // longer than the hold time and the time to answer an offer
			if l := w.sessions("listener"); len(l) != 1 || l[0].Member != "0" || l[0].PID != p.PID() {
				t.Errorf("the keeper has of listeners %+v", l)
			}
			other := w.probe("1", freeAddress(t), command...)
			p.want("transfer 0 16 1", "0")
			other.want("accept 30000", "1")
			other.want("transfer 0 16 0", "0")
			p.want("accept 30000", "1")
			w.probe("0", w.address, command...)
		})
	}
}

// TestProbeLimits checks that a commit over a limit is rejected with a reason, and the next fitting
// commit is kept.
func TestProbeLimits(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{MaxState: 1000, MaxTotal: 1870})
			p := w.probe("0", w.address, command...)
			w.connect(p)
			w.connect(p)
			kept := func(states ...int64) {
				t.Helper()
				got := map[int64]bool{}
				for _, s := range w.sessions("session") {
					got[s.State] = true
				}
				for _, want := range states {
					if !got[want] {
						t.Errorf("states of %v bytes are kept, want %v", got, states)
					}
				}
			}
			p.want("commit 0 16", "0")
			if got, _ := p.says(patience, "commit 0 1001"); !strings.Contains(got, "keeps at most 1000") {
				t.Errorf("a state over the limit: %q", got)
			}
			p.want("commit 0 1000", "0")
			kept(1000)
			p.want("commit 1 900", "0") // the keeper has not reported the total limit yet
			p.want("accept 100", "0")
			if got, _ := p.says(patience, "commit 1 901"); !strings.Contains(got, "at most 1870") {
				t.Errorf("states over the limit of all: %q", got)
			}
			p.want("commit 1 400", "0")
			kept(1000, 400)
			p.want("commit 1 401", "0")
			nstest.Until(t, "commits go on", func() bool { return w.sessions("session")[0].State+w.sessions("session")[1].State == 1401 })
		})
	}
}

// TestProbeDescriptors checks waiting for descriptors above 1023. select(2) does not support these.
func TestProbeDescriptors(t *testing.T) {
	k := newKeepers(t)
	p := k.probe("0", k.address, probes(t)["python"]...)
	p.want("files 2000", "0")
	p.want("hold 1100", "0")
	c := k.connect(p)
	go io.Copy(io.Discard, c)
	p.want("sendall 0 64", "0") // more than the socket accepts at once
	k.end()
	p.want("accept 100", "0")
	k.start()
	nstest.Until(t, "the connection to the next keeper has a large number, too", func() bool {
		p.says(patience, "accept 100")
		got, _ := p.says(patience, "commit 0 16")
		return got == "0"
	})
}

// TestProbeNextKeeper checks that a polling member gives the next keeper its sessions as of the
// last commits. A member that does not even poll does so before a transfer.
func TestProbeNextKeeper(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			k := newKeepers(t)
			p := k.probe("0", k.address, command...)
			other := k.probe("1", freeAddress(t), command...)
			k.connect(p)
			k.connect(p)
			p.want("commit 0 16", "0")
			p.want("commit 1 17", "0")
			k.end()
			k.start()
			p.Tell("idle 3000")
			nstest.Until(t, "the next keeper has both", func() bool {
				s := k.sessions("session")
				return len(s) == 2 && s[0].State+s[1].State == 33 && len(k.sessions("listener")) == 1
			})
			p.Line()
			other.want("idle 1000", "0")
			p.want("transfer 0 16 1", "0")
			other.want("accept 30000", "1")
			k.end()
			k.start()
			other.want("idle 1000", "0")
			p.want("transfer 1 17 1", "0")
			other.want("accept 30000", "1")
			other.want("commit 1 18", "0")
		})
	}
}

// TestUnreadIsAnswered checks that the receiver of a session answers a whole message committed as
// unread, although the socket has nothing to read. The state is also in a memfd.
func TestUnreadIsAnswered(t *testing.T) {
	for language, command := range languages(t) {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{})
			l := w.join("0")
			w.foreign("1", freeAddress(t), command...)
			for _, padding := range []int{0, 100_000} {
				peer := dial(t, l.Addr())
				s, err := l.AcceptSession()
				if err != nil {
					t.Fatal(err)
				}
				peer.Write([]byte("1234567"))
				if n, err := io.ReadFull(s, make([]byte, question)); err != nil {
					t.Fatal(n, err)
				}
				k := newTalk(nil)
				if err := l.Member().TransferExcept(s, "1", question, k.state(padding)); err != nil {
					t.Fatal(err)
				}
				peer.SetReadDeadline(time.Now().Add(patience))
				got := make([]byte, answer)
				_, err = io.ReadFull(peer, got)
				if want, _ := k.next([]byte("1234567")); err != nil || string(got) != string(want) {
					t.Errorf("answer %x, %v; want %x", got, err, want)
				}
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// playBroken is a release that dies after some sessions: KEEPER SERVICE NAME ADDRESS SESSIONS.
func playBroken(args []string) error {
	l, err := handoff.Listen(context.Background(), "tcp", args[3], handoff.Options{Keeper: args[0], Service: args[1], Name: args[2]})
	if err != nil {
		return err
	}
	n := 0
	fmt.Sscan(args[4], &n)
	for range n {
		if _, err = l.AcceptSession(); err != nil {
			return err
		}
	}
	os.Exit(3)
	return nil
}

// crowd starts slow clients.
func (w *world) crowd(n int) []*client {
	w.t.Helper()
	var all []*client
	for range n {
		c := w.client()
		c.pause = time.Duration(2*n) * time.Millisecond
		c.run()
		all = append(all, c)
	}
	nstest.Until(w.t, "all are kept", func() bool { return len(w.sessions("session")) == n })
	return all
}

// finish finishes all clients at once.
func finish(all []*client) {
	var w sync.WaitGroup
	for _, c := range all {
		w.Go(c.finish)
	}
	w.Wait()
}

// allAt reports whether a process owns all sessions and has accepted them.
func (w *world) allAt(pid, n int) bool {
	at := 0
	for _, s := range w.sessions("session") {
		if s.PID == pid && !s.Given {
			at++
		}
	}
	return at == n
}

// answers checks that the service answers a new client within a time.
func (w *world) answers(within time.Duration) error {
	c, err := net.Dial("tcp", w.address)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(within))
	if _, err = c.Write([]byte("1234567")); err == nil {
		_, err = c.Read(make([]byte, answer))
	}
	return err
}

// releases returns members in all languages, with the default proof.
func releases(t testing.TB) map[string]func(w *world) *nstest.Process {
	out := map[string]func(w *world) *nstest.Process{
		"go": func(w *world) *nstest.Process {
			return nstest.StartReady(t, nstest.Child("member", w.socket, "talk", "0", w.address, 0, "proof"))
		},
	}
	for language, command := range languages(t) {
		out[language] = func(w *world) *nstest.Process { return w.foreign("0", w.address, command...) }
	}
	return out
}

// hearsOfEnd waits until a process reports its replacement.
func hearsOfEnd(t testing.TB, p *nstest.Process) {
	t.Helper()
	for line, ok := p.Line(); line != "stopped: true" && line != "moved 0, failed 0"; line, ok = p.Line() {
		if !ok {
			t.Fatalf("the process has ended: %v", p.Wait())
		}
	}
}

// TestBrokenRelease starts releases that are ready and die, at once or with some or all sessions.
// The old process then has all sessions again and continues to accept. A working release gets all
// sessions, and the old process ends.
func TestBrokenRelease(t *testing.T) {
	for language, release := range releases(t) {
		t.Run(language, func(t *testing.T) {
			const sessions = 12
			w := newWorld(t, keeper.Options{})
			old := release(w)
			all := w.crowd(sessions)
			for _, dies := range []int{0, 1, sessions / 2, sessions} {
				broken := nstest.Child("broken", w.socket, "talk", "0", w.address, dies)
				if err := broken.Run(); err == nil || broken.ProcessState.ExitCode() != 3 {
					t.Fatal(err)
				}
				nstest.Until(t, fmt.Sprintf("after a release with %d sessions the old process has all", dies), func() bool { return w.allAt(old.PID(), sessions) })
				if err := w.answers(patience); err != nil {
					t.Errorf("a new client after the death of a release with %d sessions: %v", dies, err)
				}
				nstest.Until(t, "the new client is gone", func() bool { return len(w.sessions("session")) == sessions })
			}
			next := release(w)
			nstest.Until(t, "the new one has all", func() bool { return w.allAt(next.PID(), sessions) })
			hearsOfEnd(t, old)
			finish(all)
			if n := w.counts(); n.Gaps+n.Expired+n.Closed > 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// TestPoorSuccessor starts a successor with few descriptors. It gets some sessions. The old process
// serves the others and ends with them.
func TestPoorSuccessor(t *testing.T) {
	for language, release := range releases(t) {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, keeper.Options{})
			old := release(w)
			all := w.crowd(50)
			poor := nstest.StartReady(t, nstest.Child("member", w.socket, "talk", "0", w.address, 0, "poor"))
			nstest.Until(t, "it has some, and the old process the others", func() bool {
				some, others := 0, 0
				for _, s := range w.sessions("session") {
					switch {
					case s.Given:
					case s.PID == old.PID() && s.Rejected > 1: // at the first attempt and at the next
						others++
					case s.PID == poor.PID():
						some++
					}
				}
				return some > 0 && others > 0 && some+others == len(all)
			})
			finish(all)
			hearsOfEnd(t, old) // it has no sessions left
			if n := w.counts(); n.Gaps+n.Expired > 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// TestPoorSuccessorGetsRoom kills the old process while its successor has no room. The sessions
// wait and go to the successor once it has room.
func TestPoorSuccessorGetsRoom(t *testing.T) {
	t.Parallel() // mostly waiting
	w := newWorld(t, keeper.Options{})
	old := w.member("0", 0)
	all := w.crowd(30)
	poor := nstest.StartReady(t, nstest.Child("member", w.socket, "talk", "0", w.address, 0, "poor"))
	nstest.Until(t, "it has refused some", func() bool { return w.counts().Rejected > 0 })
	old.Kill()
	if err := unix.Prlimit(poor.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1000, Max: 1000}, nil); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "it has all", func() bool { return w.allAt(poor.PID(), len(all)) })
	finish(all)
	if n := w.counts(); n.Gaps+n.Expired > 0 {
		t.Errorf("%+v", n)
	}
}

// TestHangingSuccessor stops a successor before it has proved itself. The old process continues to
// accept after 2 s. When the successor continues, it replaces the old process again.
func TestHangingSuccessor(t *testing.T) {
	for language, release := range releases(t) {
		t.Run(language, func(t *testing.T) {
			t.Parallel() // mostly waiting
			w := newWorld(t, keeper.Options{})
			old := release(w)
			next := release(w)
			w.standsBy()
			stop(t, next)
			if err := w.answers(patience); err != nil {
				t.Error(err)
			}
			next.Signal(syscall.SIGCONT)
			hearsOfEnd(t, old)
			if err := w.answers(patience); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestSecondRelease replaces an unproved release by a second one. The second one must prove itself
// to both. Of three the last one stays.
func TestSecondRelease(t *testing.T) {
	for language, release := range releases(t) {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, keeper.Options{})
			old := release(w)
			all := w.crowd(5)
			second := release(w)
			third := release(w)
			nstest.Until(t, "the third has all", func() bool { return w.allAt(third.PID(), len(all)) })
			third.Kill()
			nstest.Until(t, "the second has all again", func() bool { return w.allAt(second.PID(), len(all)) })
			if err := w.answers(patience); err != nil {
				t.Error(err)
			}
			hearsOfEnd(t, old) // after the second's proof
			fourth := release(w)
			hearsOfEnd(t, second)
			nstest.Until(t, "the fourth has all", func() bool { return w.allAt(fourth.PID(), len(all)) })
			finish(all)
		})
	}
}

// TestStandbyNextKeeper restarts the keeper while a member stands by. The member stands by at the
// next keeper, too. It continues if its successor died between the keepers or dies now.
func TestStandbyNextKeeper(t *testing.T) {
	for language, release := range releases(t) {
		for _, when := range []string{"between", "after", "never"} {
			t.Run(language+"/"+when, func(t *testing.T) {
				t.Parallel()
				k := newKeepers(t)
				old := release(k.world)
				all := k.crowd(3)
				next := release(k.world)
				nstest.Until(t, "it has all", func() bool { return k.allAt(next.PID(), len(all)) })
				k.end()
				if when == "between" { // its sessions end with it
					next.Kill()
					all = nil
				}
				k.start()
				if when == "after" {
					nstest.Until(t, "both are back", func() bool { return k.allAt(next.PID(), len(all)) && len(k.ready()) == 2 })
					next.Kill()
					nstest.Until(t, "the old process has all again", func() bool { return k.allAt(old.PID(), len(all)) })
				}
				if err := k.answers(patience); err != nil {
					t.Error(err)
				}
				if when == "never" {
					hearsOfEnd(t, old)
				} else if r := k.ready(); !slices.Equal(r, []int{old.PID()}) {
					t.Errorf("ready are %v, want %d alone", r, old.PID())
				}
				finish(all)
			})
		}
	}
}

// standsBy waits until a member stands by.
func (w *world) standsBy() {
	w.t.Helper()
	nstest.Until(w.t, "the old process stands by", func() bool {
		return slices.ContainsFunc(w.keeper.Report().Services[0].Members, func(m keeper.Member) bool { return m.Standby })
	})
}

// ready returns the processes eligible for sessions.
func (w *world) ready() (pids []int) {
	for _, s := range w.keeper.Report().Services {
		for _, m := range s.Members {
			if m.Ready {
				pids = append(pids, m.PID)
			}
		}
	}
	return pids
}

// TestProof checks that a member reports its replacement only after its successor's proof, and at
// once with a keeper without proofs.
func TestProof(t *testing.T) {
	proof := func(d time.Duration) func(*handoff.Options) { return func(o *handoff.Options) { o.Proof = d } }
	w := newWorld(t, keeper.Options{})
	old, begin := w.join("0", proof(300*time.Millisecond)), time.Now()
	w.join("0")
	if _, err := old.AcceptSession(); !errors.Is(err, handoff.ErrReplaced) || time.Since(begin) < 300*time.Millisecond {
		t.Errorf("%v after %v", err, time.Since(begin))
	}
	<-old.Replaced()

	w = &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
	d := w.dies() // of an older version
	defer d.all.Wait()
	defer d.end()
	old, begin = w.join("0", proof(patience)), time.Now()
	d.mu.Lock()
	err := d.mates["0"].Send(&wire.Message{Type: wire.Replaced, Name: "0"})
	d.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := old.AcceptSession(); !errors.Is(err, handoff.ErrReplaced) || time.Since(begin) >= patience {
		t.Errorf("%v after %v", err, time.Since(begin))
	}
	old.Close()
}

// TestStandbyCloses checks that a member on standby with a returned session closes at once on
// request.
func TestStandbyCloses(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	old := w.join("0", func(o *handoff.Options) { o.Proof = time.Hour })
	peer := dial(t, old.Addr())
	if _, err := old.AcceptSession(); err != nil {
		t.Fatal(err)
	}
	next := w.join("0", func(o *handoff.Options) { o.Proof = time.Hour })
	s, err := next.AcceptSession() // returned to a member that now stands by
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := old.AcceptSession()
		ended <- err
	}()
	if err := old.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
	fmt.Fprint(peer, "hello")
	if n, err := s.Read(make([]byte, 10)); n != 5 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// TestStandbyPackets checks that during the proof only the successor reads the datagrams of a
// shared socket. If it dies, the old member continues, by all ways to read.
func TestStandbyPackets(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	open := func() (*handoff.Member, *handoff.PacketConn) {
		t.Helper()
		m, err := handoff.Join(t.Context(), handoff.Options{Service: "talk", Name: "0", Keeper: w.socket, Timeout: patience, Proof: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		p, err := m.ListenPacket(t.Context(), "udp", w.address)
		if err == nil {
			err = m.Ready()
		}
		if err != nil {
			t.Fatal(err)
		}
		return m, p
	}
	_, old := open()
	b := make([]byte, 10)
	raw, err := old.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	own := make([]byte, 10) // the earlier reader has its own
	ways := map[string]func() error{
		"Read": func() error { _, err := old.Read(own); return err },
		"SyscallConn": func() error {
			return raw.Read(func(fd uintptr) bool { _, _, err := syscall.Recvfrom(int(fd), own, 0); return err == nil })
		},
	}
	peer, err := net.Dial("udp", w.address)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	for way, read := range ways {
		got := make(chan error, 1)
		go func() { got <- read() }()
		m, next := open()
		w.standsBy()
		for range 50 {
			peer.Write([]byte("x"))
			next.SetReadDeadline(time.Now().Add(patience))
			if _, err := next.Read(b); err != nil {
				t.Fatalf("%s: the new one: %v", way, err)
			}
		}
		m.Close()
		peer.Write([]byte("y"))
		if err := <-got; err != nil {
			t.Errorf("%s: the old member: %v", way, err)
		}
	}
	old.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := old.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v, want a timeout", err)
	}
}

// fewFiles limits the descriptors of the process to a few more.
func fewFiles() error {
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	var limit unix.Rlimit
	err = unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	if limit.Cur = uint64(len(open) + 20); err == nil {
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	}
	return os.NewSyscallError("rlimit", err)
}

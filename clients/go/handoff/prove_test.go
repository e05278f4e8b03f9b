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

// crowd is some clients that talk slowly.
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

// finish is finish of all at once.
func finish(all []*client) {
	var w sync.WaitGroup
	for _, c := range all {
		w.Go(c.finish)
	}
	w.Wait()
}

// allAt says whether all sessions are a process's for good.
func (w *world) allAt(pid, n int) bool {
	at := 0
	for _, s := range w.sessions("session") {
		if s.PID == pid && !s.Given {
			at++
		}
	}
	return at == n
}

// answers says whether the service answers a new client, within a time.
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

// releases are members in all languages, with the proof that is the default.
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

// hearsOfEnd waits until a process has heard that it is replaced.
func hearsOfEnd(t testing.TB, p *nstest.Process) {
	t.Helper()
	for line, ok := p.Line(); line != "stopped: true" && line != "moved 0, failed 0"; line, ok = p.Line() {
		if !ok {
			t.Fatalf("the process has ended: %v", p.Wait())
		}
	}
}

// Releases that are ready and die, at once or with some or all sessions, cost nothing: the process before has all sessions then and
// goes on accepting. One that works has them all, and the process before ends.
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
				nstest.Until(t, fmt.Sprintf("after one of %d the process before has all", dies), func() bool { return w.allAt(old.PID(), sessions) })
				if err := w.answers(patience); err != nil {
					t.Errorf("after one that has died with %d sessions a new client: %v", dies, err)
				}
				nstest.Until(t, "the new client has gone", func() bool { return len(w.sessions("session")) == sessions })
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

// A successor with few descriptors takes some sessions. The others stay with the process before, which serves them, and ends when
// they do.
func TestPoorSuccessor(t *testing.T) {
	for language, release := range releases(t) {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, keeper.Options{})
			old := release(w)
			all := w.crowd(50)
			poor := nstest.StartReady(t, nstest.Child("member", w.socket, "talk", "0", w.address, 0, "poor"))
			nstest.Until(t, "it has some, and the process before the others", func() bool {
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
			hearsOfEnd(t, old) // now that it has none
			if n := w.counts(); n.Gaps+n.Expired > 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// If the process before is ended while its successor has no room, the sessions wait, and are the successor's once it has.
func TestPoorSuccessorGetsRoom(t *testing.T) {
	t.Parallel() // nearly all of it is waiting
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

// A successor that hangs before it has proved itself is no successor: the process before goes on accepting after 2 s. When the
// other goes on, it is replaced again.
func TestHangingSuccessor(t *testing.T) {
	for language, release := range releases(t) {
		t.Run(language, func(t *testing.T) {
			t.Parallel() // nearly all of it is waiting
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

// A second release that replaces an unproved one has to prove itself, too, to both; of three the last one stays.
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
			hearsOfEnd(t, old) // of the second's proof
			fourth := release(w)
			hearsOfEnd(t, second)
			nstest.Until(t, "the fourth has all", func() bool { return w.allAt(fourth.PID(), len(all)) })
			finish(all)
		})
	}
}

// The keeper is restarted while a member stands by: it still stands by at the next one, and goes on if its successor has died
// without a keeper, or dies now.
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
				if when == "between" { // which takes its sessions along
					next.Kill()
					all = nil
				}
				k.start()
				if when == "after" {
					nstest.Until(t, "both are back", func() bool { return k.allAt(next.PID(), len(all)) && len(k.ready()) == 2 })
					next.Kill()
					nstest.Until(t, "the process before has all again", func() bool { return k.allAt(old.PID(), len(all)) })
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
	nstest.Until(w.t, "the process before stands by", func() bool {
		return slices.ContainsFunc(w.keeper.Report().Services[0].Members, func(m keeper.Member) bool { return m.Standby })
	})
}

// ready are the processes that may be given sessions.
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

// A member hears that it is replaced when its successor has proved itself, not before; and at once from a keeper that knows no
// proof.
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
	d := w.dies() // of a version before
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

// A member that stands by, with a session that came back, leaves at once if it is told to.
func TestStandbyCloses(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	old := w.join("0", func(o *handoff.Options) { o.Proof = time.Hour })
	peer := dial(t, old.Addr())
	if _, err := old.AcceptSession(); err != nil {
		t.Fatal(err)
	}
	next := w.join("0", func(o *handoff.Options) { o.Proof = time.Hour })
	s, err := next.AcceptSession() // the proof is that it stands by
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

// While a successor proves itself it alone reads the datagrams of a socket that both have. If it dies the member before goes on, by
// all ways to read.
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
	own := make([]byte, 10) // the reader before has one of its own
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
			t.Errorf("%s: the one before: %v", way, err)
		}
	}
	old.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := old.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v, want that the time is over", err)
	}
}

// fewFiles has the process have room for some sessions.
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

// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// join creates a member in this process.
func (w *world) join(name string, more ...func(*handoff.Options)) *handoff.Listener {
	w.t.Helper()
	o := handoff.Options{Service: "talk", Name: name, Keeper: w.socket, Timeout: patience, Proof: 20 * time.Millisecond}
	for _, f := range more {
		f(&o)
	}
	l, err := handoff.Listen(w.t.Context(), "tcp", "127.0.0.1:0", o)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { l.Close() })
	return l
}

func dial(t testing.TB, a net.Addr) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", a.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn)
}

// TestKeeperKilled kills and restarts the keeper repeatedly. Sessions continue, and a crash after
// its return loses nothing.
func TestKeeperKilled(t *testing.T) {
	nstest.NeedRoot(t)
	w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
	k := nstest.StartReady(t, nstest.Child("keeper", w.socket))
	m := w.member("0", 0)
	c := w.client()
	c.run()
	for range 10 {
		c.hears(20)
		k.Kill()
		time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
		k = nstest.StartReady(t, nstest.Child("keeper", w.socket))
		nstest.Until(t, "the session is kept again", func() bool {
			r, err := handoff.Status(t.Context(), w.socket)
			return err == nil && len(r.Services) == 1 && len(r.Services[0].Sessions) == 2
		})
		m.Kill()
		m = w.member("0", 0)
	}
	c.finish()
}

// TestKeeperKilledWhileMoving kills the keeper during moves. Every session has one owner
// afterwards.
func TestKeeperKilledWhileMoving(t *testing.T) {
	nstest.NeedRoot(t)
	w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
	k := nstest.StartReady(t, nstest.Child("keeper", w.socket))
	a, b := w.member("a", 0), w.memberAt(freeAddress(t), "b", 0)
	c := w.client()
	c.run()
	stop := make(chan struct{})
	var mover sync.WaitGroup
	mover.Go(func() {
		for {
			for _, o := range []struct {
				p  *nstest.Process
				to string
			}{{a, "b"}, {b, "a"}} {
				select {
				case <-stop:
					return
				default:
				}
				o.p.Tell("move " + o.to)
				o.p.Line()
			}
		}
	})
	rounds := 5
	if testing.Short() {
		rounds = 1
	}
	for range rounds {
		c.hears(100)
		k.Kill()
		k = nstest.StartReady(t, nstest.Child("keeper", w.socket))
		time.Sleep(2 * time.Second) // longer than a member waits for an uncertain session
	}
	close(stop)
	mover.Wait()
	c.finish()
}

// TestHold checks that sessions of a dead member without a replacement wait, and are finally reset.
func TestHold(t *testing.T) {
	w := newWorld(t, keeper.Options{Hold: 300 * time.Millisecond})
	m := w.member("0", 0)
	conn := dial(t, tcpAddr(t, w.address))
	nstest.Until(t, "the session is kept", func() bool { return len(w.sessions("session")) == 1 })
	start := time.Now()
	m.Kill()
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer sees %v, want a reset", err)
	}
	if d := time.Since(start); d < 250*time.Millisecond {
		t.Errorf("after %v, want at least the time of holding", d)
	}
	nstest.Until(t, "it is counted", func() bool { return w.counts().Expired == 2 }) // the listener, too
}

// TestReplacedMemberHangs checks that a hanging process keeps its sessions after its replacement,
// until it is killed. The new process gets new connections at once.
func TestReplacedMemberHangs(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	old := w.member("0", 0)
	c := w.client()
	c.run()
	nstest.Until(t, "the session is kept", func() bool { return len(w.sessions("session")) == 1 })
	stop(t, old)
	w.member("0", 0)
	c2 := w.client()
	c2.run()
	nstest.Until(t, "the new one serves", func() bool { return len(w.sessions("session")) == 2 })
	for _, s := range w.sessions("session") {
		if s.Remote == c.conn.LocalAddr().String() && s.PID != old.PID() {
			t.Errorf("the session is with process %d, and %d lives", s.PID, old.PID())
		}
	}
	c2.finish()
	old.Kill()
	c.finish()
	if n := w.counts(); n.Rescued != 1 {
		t.Errorf("%+v", n)
	}
}

// TestGap checks that a session is reset if its member took bytes without a commit.
func TestGap(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	m := nstest.StartReady(t, nstest.Child("careless", w.socket, w.address))
	conn := dial(t, tcpAddr(t, w.address))
	conn.Write([]byte("hello"))
	m.Expect("consumed")
	m.Kill()
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer sees %v, want a reset", err)
	}
	nstest.Until(t, "it is counted", func() bool { return w.counts().Gaps == 1 })
}

// playCareless takes bytes of a session, bypassing the library.
func playCareless(args []string) error {
	l, err := handoff.Listen(context.Background(), "tcp", args[1], handoff.Options{Service: "talk", Name: "0", Keeper: args[0], Timeout: patience})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	s, err := l.AcceptSession()
	if err != nil {
		return err
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	if err := raw.Read(func(fd uintptr) bool { n, _ := syscall.Read(int(fd), make([]byte, 3)); return n == 3 }); err != nil {
		return err
	}
	fmt.Println("consumed")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// TestOrphans checks that sessions of a dead member go to a member with Orphans set, after the
// grace period.
func TestOrphans(t *testing.T) {
	w := newWorld(t, keeper.Options{Grace: 200 * time.Millisecond})
	m := w.member("a", 0)
	w.memberAt(freeAddress(t), "b", 0, "orphans")
	c := w.client()
	c.run()
	nstest.Until(t, "the session is kept", func() bool { return len(w.sessions("session")) == 1 })
	m.Kill()
	nstest.Until(t, "b has the session and the listener", func() bool {
		s, l := w.sessions("session"), w.sessions("listener")
		return len(s) == 1 && s[0].Member == "b" && len(l) == 2 && l[0].Member == "b" && l[1].Member == "b"
	})
	c2 := w.client() // through the dead member's listener
	c2.run()
	c2.hears(1)
	c.finish()
	c2.finish()
}

// TestCredentials checks that a process gets only the sessions of its own services.
func TestCredentials(t *testing.T) {
	rule := func(s string) keeper.Rule {
		r, err := keeper.ParseRule(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	pidfile := filepath.Join(t.TempDir(), "pid")
	rules := keeper.Rules{rule("talk:uid=1001"), rule("other:uid=1002"), rule("third:gid=1003"), rule("fourth:pidfile=" + pidfile)}
	w := newWorld(t, keeper.Options{Allow: rules.Allow})
	chmodUp(t, filepath.Dir(w.socket))
	for _, x := range []struct {
		service string
		id      uint32
		want    string
	}{
		{"talk", 1001, "welcome"}, {"talk", 1002, "refused"}, {"other", 1002, "welcome"}, {"other", 1001, "refused"},
		{"third", 1003, "welcome"}, {"unknown", 1001, "refused"}, {"unknown", 0, "welcome"}, {"fourth", 1004, "refused"},
	} {
		p := w.stranger(x.service, x.id)
		p.Tell("go")
		p.Expect(x.want)
		p.Kill()
	}
	// The process of a pid file, of any user.
	p := w.stranger("fourth", 1004)
	if err := os.WriteFile(pidfile, fmt.Append(nil, p.PID(), "\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	p.Tell("go")
	p.Expect("welcome")
	if r := w.keeper.Report(); r.Strange != 4 {
		t.Errorf("%d processes were turned away, want 4", r.Strange)
	}
	// A member of one service neither sees nor directs the sessions of another.
	l := w.join("0")
	dial(t, l.Addr())
	if _, err := l.AcceptSession(); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "the session is kept", func() bool { return len(w.sessions("session")) == 1 })
	// Nor sessions of root's member of its own service.
	for _, id := range []uint32{1001, 1002} {
		p := w.stranger("", id)
		p.Tell("go")
		p.Expect("sees 0")
		if id == 1001 {
			p.Expect("send no peer")
		} else {
			p.Expect("send refused")
		}
	}
}

func (w *world) stranger(service string, id uint32) *nstest.Process {
	c := nstest.Child("stranger", w.socket, service)
	c.SysProcAttr.Credential = &syscall.Credential{Uid: id, Gid: id}
	return nstest.StartReady(w.t, c)
}

// playStranger says hello to a service, or prints the number of visible sessions.
func playStranger(args []string) error {
	fmt.Println("ready")
	var line string
	fmt.Scanln(&line)
	ctx := context.Background()
	if args[1] != "" {
		m, err := handoff.Join(ctx, handoff.Options{Keeper: args[0], Service: args[1], Name: "x", Timeout: patience})
		switch {
		case err == nil:
			fmt.Println("welcome")
			m.Ready()
		case errors.Is(err, handoff.ErrNotMember):
			fmt.Println("refused")
		default:
			return err
		}
		_, err = io.Copy(io.Discard, os.Stdin)
		return err
	}
	r, err := handoff.Status(ctx, args[0])
	if err != nil {
		return err
	}
	n := 0
	for _, s := range r.Services {
		if s.Name == "talk" {
			n = len(s.Sessions) - 1 // without the listener
		}
	}
	fmt.Println("sees", max(n, 0))
	err = handoff.Send(ctx, args[0], "talk", "0", 0, "nobody")
	switch {
	case errors.Is(err, handoff.ErrNotMember):
		fmt.Println("send refused")
	case errors.Is(err, handoff.ErrNoPeer):
		fmt.Println("send no peer")
	default:
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

func tcpAddr(t testing.TB, s string) net.Addr {
	t.Helper()
	a, err := net.ResolveTCPAddr("tcp", s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// chmodUp gives all users access to a directory of this test.
func chmodUp(t testing.TB, dir string) {
	t.Helper()
	for ; dir != "/" && dir != os.TempDir(); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

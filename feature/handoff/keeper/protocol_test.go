// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// run starts a keeper in this process.
func run(t testing.TB, o Options) (*Keeper, string) {
	t.Helper()
	nstest.NeedRoot(t)
	socket := filepath.Join(t.TempDir(), "keeper.sock")
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	k := New(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- k.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return k, socket
}

// mate is a member using the bare protocol.
type mate struct {
	t testing.TB
	*wire.Conn
}

func connect(t testing.TB, socket string) mate {
	t.Helper()
	c, err := wire.Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return mate{t, c}
}

func hello(t testing.TB, socket, service, name string) mate {
	t.Helper()
	m := connect(t, socket)
	m.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: service, Name: name})
	m.hear(wire.Welcome)
	return m
}

func (m mate) say(msg *wire.Message, fds ...int) {
	m.t.Helper()
	if err := m.Send(msg, fds...); err != nil {
		m.t.Fatal(err)
	}
}

func (m mate) hear(want wire.Type) (wire.Message, []int) {
	m.t.Helper()
	m.SetReadDeadline(time.Now().Add(30 * time.Second))
	msg, fds, err := m.Receive()
	if err != nil || msg.Type != want {
		m.t.Fatalf("heard type %#x (%s), %v; want %#x", uint8(msg.Type), msg.Text, err, uint8(want))
	}
	m.t.Cleanup(func() { wire.CloseAll(fds) })
	return msg, fds
}

func (m mate) refused(want wire.Code) {
	m.t.Helper()
	msg, _ := m.hear(wire.Error)
	if wire.Code(msg.Number) != want || msg.Text == "" {
		m.t.Errorf("error %d (%s), want %d", msg.Number, msg.Text, want)
	}
}

// stream returns one end of a TCP connection, its cookie, and the other end.
func stream(t testing.TB) (fd int, id uint64, peer net.Conn) {
	t.Helper()
	lc := net.ListenConfig{}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if peer, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close(); c.Close() })
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(n uintptr) { fd = int(n); id, err = sock.Cookie(fd) })
	if err != nil {
		t.Fatal(err)
	}
	return fd, id, peer
}

func descriptors(t testing.TB) int {
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// TestRefusals checks that forbidden requests get a specific error and leave the member connected. A malformed
// message ends the connection.
func TestRefusals(t *testing.T) {
	_, socket := run(t, Options{})
	fd, id, _ := stream(t)
	m := connect(t, socket)
	m.say(&wire.Message{Type: wire.Keep, Session: id, Number: uint32(wire.Stream)}, fd)
	m.refused(wire.NotMember) // before Hello
	m.say(&wire.Message{Type: wire.Hello, Seq: 2, Text: "no name", Name: "0"})
	m.refused(wire.Malformed)
	m.say(&wire.Message{Type: wire.Hello, Seq: 2, Text: "talk"})
	m.refused(wire.Malformed)
	m.say(&wire.Message{Type: wire.Hello, Seq: 3, Text: "talk", Name: "0"})
	if msg, _ := m.hear(wire.Welcome); msg.Seq != 3 || msg.Read == 0 || msg.Written == 0 {
		t.Errorf("welcome: %+v", msg)
	}
	m.say(&wire.Message{Type: wire.Hello, Seq: 3, Text: "talk", Name: "0"})
	m.refused(wire.Malformed) // a second Hello
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, x := range []struct {
		msg  wire.Message
		fds  []int
		want wire.Code
	}{
		{wire.Message{Type: wire.Keep, Session: id, Number: 1}, nil, wire.BadSocket},
		{wire.Message{Type: wire.Keep, Session: id, Number: 1}, []int{int(null.Fd())}, wire.BadSocket},
		{wire.Message{Type: wire.Keep, Session: id, Number: 2}, []int{fd}, wire.BadSocket},
		{wire.Message{Type: wire.Keep, Session: id, Number: 3}, []int{fd}, wire.BadSocket},
		{wire.Message{Type: wire.Keep, Session: id, Number: 77}, []int{fd}, wire.BadSocket},
		{wire.Message{Type: wire.Keep, Session: id + 1, Number: 1}, []int{fd}, wire.BadSocket},
		{wire.Message{Type: wire.Keep, Session: id, Number: 1, Flags: wire.StateFD, Sizes: [2]uint64{5, 0}}, []int{fd}, wire.BadSocket},
		{wire.Message{Type: wire.Keep, Session: id, Number: 1, Flags: wire.StateFD, Sizes: [2]uint64{5, 0}}, []int{fd, int(null.Fd())}, wire.BadSocket},
		{wire.Message{Type: wire.Keep, Session: id, Number: 1, Flags: wire.StateFD, Sizes: [2]uint64{5, 0}}, nil, wire.BadSocket},
		{wire.Message{Type: wire.Commit, Session: id}, nil, wire.NoSession},
		{wire.Message{Type: wire.Drop, Session: id}, nil, wire.NoSession},
		{wire.Message{Type: wire.Transfer, Session: id}, nil, wire.NoSession},
		{wire.Message{Type: wire.Reject, Session: id}, nil, wire.NoSession},
		{wire.Message{Type: wire.Find, Text: "x", Number: 2}, nil, wire.NotFound},
		{wire.Message{Type: wire.Send, Session: id, Text: "talk/"}, nil, wire.NoSession},
		{wire.Message{Type: wire.Send, Text: "talk/1"}, nil, wire.NoPeer},
		{wire.Message{Type: wire.Send, Text: "talk/0"}, nil, wire.Unable},
		{wire.Message{Type: wire.Send, Text: "none/0"}, nil, wire.NoSession},
		{wire.Message{Type: 0x7f}, nil, wire.Malformed},
		{wire.Message{Type: wire.Welcome}, nil, wire.Malformed},
	} {
		x.msg.Seq = 9
		m.say(&x.msg, x.fds...)
		m.refused(x.want)
	}
	m.say(&wire.Message{Type: wire.Keep, Seq: 4, Session: id, Number: 1, Read: 100}, fd)
	m.hear(wire.OK)
	m.say(&wire.Message{Type: wire.Commit, Session: id, Read: 99})
	m.refused(wire.Malformed) // backwards
	other := hello(t, socket, "talk", "1")
	other.say(&wire.Message{Type: wire.Keep, Seq: 1, Session: id, Number: 1, Read: 100}, fd)
	other.refused(wire.Owned)
	other.say(&wire.Message{Type: wire.Commit, Session: id, Read: 200})
	other.refused(wire.NoSession)
	m.say(&wire.Message{Type: wire.Transfer, Seq: 1, Session: id, Name: "1", Read: 100})
	m.refused(wire.NoPeer) // not ready
	other.say(&wire.Message{Type: wire.Ready, Seq: 2, Number: 1})
	other.hear(wire.OK)
	m.say(&wire.Message{Type: wire.Transfer, Seq: 1, Session: id, Name: "1", Read: 101, State: []byte("s"), Unread: []byte("u")})
	m.hear(wire.OK)
	if msg, fds := other.hear(wire.Give); msg.Read != 101 || string(msg.State) != "s" || string(msg.Unread) != "u" || len(fds) != 1 || msg.Name != "0" {
		t.Errorf("given %+v, descriptors %v", msg, fds)
	}
	m.say(&wire.Message{Type: wire.Commit, Session: id, Read: 102})
	m.refused(wire.NoSession) // not the owner any more
	// After a rejection it returns.
	m.say(&wire.Message{Type: wire.Ready, Number: 1})
	m.say(&wire.Message{Type: wire.Find, Seq: 5, Text: "x", Number: 2})
	m.refused(wire.NotFound) // it is ready by now
	other.say(&wire.Message{Type: wire.Reject, Session: id})
	if msg, _ := m.hear(wire.Give); msg.Flags&wire.Returned == 0 || msg.Name != "1" {
		t.Errorf("given back %+v", msg)
	}
	bad := connect(t, socket)
	bad.say(&wire.Message{Type: wire.Hello, Version: 2, Seq: 1, Text: "talk", Name: "0"})
	bad.refused(wire.BadVersion)
	bad.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, _, err := bad.Receive(); err != io.EOF {
		t.Errorf("after another version: %v, want the end", err)
	}
}

// TestGivenAndNotReceived gives sessions to a process that loses its connection before accepting them. Others get the
// sessions not kept after its reconnect; the sessions it keeps again are its own.
func TestGivenAndNotReceived(t *testing.T) {
	k, socket := run(t, Options{})
	from := hello(t, socket, "talk", "0")
	from.say(&wire.Message{Type: wire.Ready, Seq: 1, Number: 1})
	from.hear(wire.OK)
	to := hello(t, socket, "talk", "1")
	to.say(&wire.Message{Type: wire.Ready, Seq: 1, Number: 1})
	to.hear(wire.OK)
	var fds []int
	var ids []uint64
	for range 3 {
		fd, id, _ := stream(t)
		from.say(&wire.Message{Type: wire.Keep, Seq: 2, Session: id, Number: 1}, fd)
		from.hear(wire.OK)
		from.say(&wire.Message{Type: wire.Transfer, Seq: 3, Session: id, Name: "1", State: []byte("s")})
		from.hear(wire.OK)
		fds, ids = append(fds, fd), append(ids, id)
	}
	to.hear(wire.Give)
	to.say(&wire.Message{Type: wire.Accept, Session: ids[0]})
	to.Close() // with two unread
	nstest.Until(t, "the connection has ended", func() bool { return len(k.Report().Services[0].Members) == 1 })
	again := hello(t, socket, "talk", "1")
	again.say(&wire.Message{Type: wire.Keep, Seq: 4, Session: ids[1], Number: 1, State: []byte("s")}, fds[1])
	again.hear(wire.OK)
	time.Sleep(2 * missedTime) // until Ready, it may still announce sessions
	again.say(&wire.Message{Type: wire.Ready, Seq: 5, Number: 1})
	again.hear(wire.OK)
	if msg, _ := from.hear(wire.Give); msg.Session != ids[2] || msg.Flags&wire.Returned == 0 || string(msg.State) != "s" {
		t.Errorf("given back: %+v, want session %d", msg, ids[2])
	}
	from.say(&wire.Message{Type: wire.Accept, Session: ids[2]})
	from.say(&wire.Message{Type: wire.Keep, Seq: 6, Session: ids[1], Number: 1, State: []byte("s")}, fds[1])
	from.refused(wire.Owned)
	again.say(&wire.Message{Type: wire.Keep, Seq: 6, Session: ids[0], Number: 1, State: []byte("s")}, fds[0]) // accepted before: it stays the owner
	again.hear(wire.OK)
	// The sender has gone as well: the session waits for its name.
	from.say(&wire.Message{Type: wire.Transfer, Seq: 7, Session: ids[2], Name: "1"})
	from.hear(wire.OK)
	from.Close()
	again.Close()
	nstest.Until(t, "the connections have ended", func() bool { return len(k.Report().Services[0].Members) == 0 })
	last := hello(t, socket, "talk", "1")
	last.say(&wire.Message{Type: wire.Ready, Seq: 1, Number: 1})
	last.hear(wire.OK)
	if msg, _ := last.hear(wire.Give); msg.Session != ids[2] {
		t.Errorf("given: %+v, want session %d", msg, ids[2])
	}
}

// TestGivenAndNotReceivedByTheReplaced checks the same for a replaced member. After its reconnect it sends Ready 0.
// Earlier sessions not kept by then were never received.
func TestGivenAndNotReceivedByTheReplaced(t *testing.T) {
	k, socket := run(t, Options{})
	from := ready(t, socket, "0")
	to := ready(t, socket, "1")
	fd, id, _ := stream(t)
	from.say(&wire.Message{Type: wire.Keep, Seq: 2, Session: id, Number: 1}, fd)
	from.hear(wire.OK)
	from.say(&wire.Message{Type: wire.Transfer, Seq: 3, Session: id, Name: "1"})
	from.hear(wire.OK)
	to.Close()
	nstest.Until(t, "the connection has ended", func() bool { return len(k.Report().Services[0].Members) == 1 })
	again := hello(t, socket, "talk", "1")
	again.say(&wire.Message{Type: wire.Ready, Seq: 5, Number: 0})
	again.hear(wire.OK)
	if msg, _ := from.hear(wire.Give); msg.Session != id || msg.Flags&wire.Returned == 0 {
		t.Errorf("given back: %+v, want session %d", msg, id)
	}
}

// ready is hello followed by Ready.
func ready(t testing.TB, socket, name string) mate {
	t.Helper()
	m := hello(t, socket, "talk", name)
	m.say(&wire.Message{Type: wire.Ready, Seq: 1, Number: 1})
	m.hear(wire.OK)
	return m
}

// TestWhy checks the reported reason of a return. It stays while the session is with its former owner, and disappears
// once a third member has accepted the session.
func TestWhy(t *testing.T) {
	k, socket := run(t, Options{})
	from, to := ready(t, socket, "0"), ready(t, socket, "1")
	fd, id, _ := stream(t)
	from.say(&wire.Message{Type: wire.Keep, Seq: 2, Session: id, Number: 1}, fd)
	from.hear(wire.OK)
	refuse := func() {
		t.Helper()
		from.say(&wire.Message{Type: wire.Transfer, Seq: 3, Session: id, Name: "1"})
		from.hear(wire.OK)
		to.hear(wire.Give)
		to.say(&wire.Message{Type: wire.Reject, Session: id, Text: "no room"})
	}
	why := func(m mate, want string) {
		t.Helper()
		m.hear(wire.Give)
		m.say(&wire.Message{Type: wire.Accept, Session: id})
		nstest.Until(t, "the session is not given", func() bool { return !k.Report().Services[0].Sessions[0].Given })
		if got := k.Report().Services[0].Sessions[0]; got.ReturnReason != want {
			t.Errorf("%+v, want why %q", got, want)
		}
	}
	refuse()
	why(from, "no room")
	from.say(&wire.Message{Type: wire.Ready, Seq: 5, Number: 0}) // it does not return to its sender
	from.hear(wire.OK)
	refuse()
	third := hello(t, socket, "talk", "1")
	third.say(&wire.Message{Type: wire.Ready, Number: 1})
	why(third, "")
}

// TestMalformedMessages sends random bytes and messages. The keeper survives, and leaks no descriptor.
func TestMalformedMessages(t *testing.T) {
	rounds := 300
	if testing.Short() {
		rounds = 50
	}
	k, socket := run(t, Options{Hold: time.Millisecond})
	witness := hello(t, socket, "talk", "witness")
	fd, id, _ := stream(t)
	before := descriptors(t)
	r := rand.New(rand.NewPCG(7, 7))
	for range rounds {
		u, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		good, _ := (&wire.Message{Type: wire.Hello, Text: "talk", Name: "bad"}).Append(nil)
		u.Write(good)
		u.Write([]byte{1, byte(wire.Ready), 7: 0, 32: 1, 47: 0})
		for range 20 {
			b := scramble(r, id)
			var oob []byte
			if n := r.IntN(4); n > 0 {
				oob = unix.UnixRights([]int{fd, 0, fd}[:n]...)
			}
			if _, _, err := u.WriteMsgUnix(b, oob, nil); err != nil {
				break // the keeper has closed the connection
			}
		}
		u.Close()
	}
	witness.say(&wire.Message{Type: wire.Find, Seq: 5, Text: "x", Number: 2})
	witness.refused(wire.NotFound)
	// This process lives, so its sessions are not given to others. It can claim and drop them.
	witness.say(&wire.Message{Type: wire.Leave})
	nstest.Eventually(t, func() error {
		kept := 0
		for _, s := range k.Report().Services {
			kept += len(s.Sessions)
		}
		now := descriptors(t)
		if now > before+kept+1 {
			return fmt.Errorf("%d descriptors are open with %d sessions kept, %d were", now, kept, before)
		}
		t.Logf("%d sessions are kept, %d descriptors open, %d were", kept, now, before)
		return nil
	})
}

// scramble returns a message with random changes, or random bytes.
func scramble(r *rand.Rand, id uint64) []byte {
	if r.IntN(10) == 0 {
		b := make([]byte, 1+r.IntN(200))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return b
	}
	m := wire.Message{Type: wire.Type(r.IntN(14)), Session: id, Number: uint32(r.IntN(5)), Seq: uint32(r.IntN(3)), Name: []string{"", "bad", "witness"}[r.IntN(3)],
		Text: "talk/bad"[:r.IntN(9)], Read: r.Uint64N(10), Written: r.Uint64N(10)}
	if r.IntN(2) == 0 {
		m.State = bytes.Repeat([]byte("s"), r.IntN(wire.MaxInline))
	}
	if r.IntN(8) == 0 {
		m.Flags = wire.Flags(r.IntN(1 << 15))
	}
	b, err := m.Append(nil)
	if err != nil {
		panic(err)
	}
	if r.IntN(10) == 0 {
		b[r.IntN(len(b))] ^= byte(1 + r.IntN(255))
	}
	return b
}

// TestDetached checks that a live process keeps its sessions after its connection has ended, exclusively. It
// reconnects with them.
func TestDetached(t *testing.T) {
	k, socket := run(t, Options{Hold: 50 * time.Millisecond})
	fd, id, peer := stream(t)
	m := hello(t, socket, "talk", "0")
	m.say(&wire.Message{Type: wire.Keep, Seq: 2, Session: id, Number: 1, State: []byte("old")}, fd)
	m.hear(wire.OK)
	other := hello(t, socket, "talk", "0")
	other.say(&wire.Message{Type: wire.Ready, Seq: 2, Number: 1})
	other.hear(wire.OK)
	m.Close()
	other.SetReadDeadline(time.Now().Add(300 * time.Millisecond)) // far longer than the hold
	if msg, _, err := other.Receive(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("somebody else heard type %#x, %v", uint8(msg.Type), err)
	}
	back := hello(t, socket, "talk", "0")
	back.say(&wire.Message{Type: wire.Keep, Seq: 2, Session: id, Number: 1, State: []byte("new")}, fd)
	back.hear(wire.OK)
	fmt.Fprint(peer, "x")
	if r := k.Report(); len(r.Services) != 1 || len(r.Services[0].Sessions) != 1 || r.State != 3 {
		t.Errorf("%+v", r)
	}
}

// TestDetachedUnread reconnects while the keeper has not read the former connection to its end, because it is slow.
// The member still owns its sessions. While the former connection is open, it does not.
func TestDetachedUnread(t *testing.T) {
	k, socket := run(t, Options{})
	fd, id, _ := stream(t)
	m := hello(t, socket, "talk", "0")
	m.say(&wire.Message{Type: wire.Keep, Seq: 2, Session: id, Number: 1, State: []byte("old")}, fd)
	m.hear(wire.OK)
	hello(t, socket, "talk", "0")
	keep := func() error {
		v := k.services["talk"]
		left, err := k.keep(v.members[len(v.members)-1], &wire.Message{Type: wire.Keep, Session: id, Number: 1, State: []byte("new")}, []int{fd})
		if err == nil && len(left) != 1 {
			t.Error("a second descriptor of the session was taken")
		}
		return err
	}
	k.mu.Lock() // the keeper reads nothing
	defer k.mu.Unlock()
	if err := keep(); !errors.Is(err, wire.ErrOwned) {
		t.Errorf("while the former connection is open: %v", err)
	}
	m.say(&wire.Message{Type: wire.Commit, Session: id})
	m.Close()
	if err := keep(); err != nil {
		t.Errorf("after that was closed: %v", err)
	}
	if s := k.sessions[id]; string(s.state) != "new" || s.owner.gone {
		t.Errorf("it stands at %q", s.state)
	}
}

// TestMovesAreAgents checks the owner of sessions after an agent's death. A session with a move under way waits for an
// agent, without a time limit: for the agent of the same destination, or an agent resuming all moves. A session
// without a move is for its application.
func TestMovesAreAgents(t *testing.T) {
	const grace = 20 * time.Millisecond
	for _, c := range []struct {
		name  string
		state string
		there []string // members ready after the agent's death
		want  string   // the new owner; "": none
	}{
		{"moving, application", wire.MoveMagic + "1", []string{"0"}, ""},
		{"moving, another way", wire.MoveMagic + "1", []string{"0", "@c"}, ""},
		{"moving, the same way", wire.MoveMagic + "1", []string{"0", "@home", "@b"}, "@b"},
		{"moving, home", wire.MoveMagic + "1", []string{"0", "@c", "@home"}, "@home"},
		{"not begun", "state", []string{"@c", "@home", "0"}, "0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := New(Options{Grace: grace})
			fd, id, _ := stream(t)
			var agent *member
			mates := map[*member]string{}
			v := k.service("talk")
			for _, name := range append([]string{"@b"}, c.there...) {
				m := &member{process: &process{}, service: v, name: name, ready: true, sessions: map[uint64]*session{}, given: map[uint64]time.Time{},
					queue: []outgoing{{}}} // its messages are queued
				switch {
				case agent == nil:
					agent, m.ready = m, false
				case name == "0":
					m.caps = wire.TakesOrphans
				case name == "@home":
					m.caps = wire.Resumes
				}
				mates[m] = name
				v.members = append(v.members, m)
			}
			fd, err := unix.Dup(fd)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := k.keep(agent, &wire.Message{Session: id, Number: 1, State: []byte(c.state)}, []int{fd}); err != nil {
				t.Fatal(err)
			}
			s := k.sessions[id]
			defer k.remove(s, false)
			v.members = v.members[1:]
			k.orphan(agent, true)
			for _, waited := range []time.Duration{0, grace, k.Hold - time.Second} {
				k.assignOrphans(v, s.waits.Add(waited))
			}
			if got := mates[s.owner]; got != c.want {
				t.Errorf("it is %q's, want %q's", got, c.want)
			}
		})
	}
}

// TestTransferLost checks that an immovable session stays with its owner.
func TestTransferLost(t *testing.T) {
	_, socket := run(t, Options{})
	m, other := hello(t, socket, "talk", "0"), hello(t, socket, "talk", "1")
	other.say(&wire.Message{Type: wire.Ready, Seq: 2, Number: 1})
	other.hear(wire.OK)
	fd, id, peer := stream(t)
	m.say(&wire.Message{Type: wire.Keep, Seq: 1, Session: id, Number: uint32(wire.Stream)}, fd)
	m.hear(wire.OK)
	fmt.Fprint(peer, "hello")
	nstest.Until(t, "two bytes are read", func() bool { n, _ := unix.Read(fd, make([]byte, 2)); return n == 2 })
	transfer := func(read uint64) {
		m.say(&wire.Message{Type: wire.Transfer, Seq: 2, Session: id, Read: read, Name: "1"})
	}
	transfer(1)
	m.refused(wire.Lost) // two bytes were read, one is committed
	unix.Shutdown(fd, unix.SHUT_WR)
	peer.Close()
	nstest.Eventually(t, func() error {
		if _, err := sock.ReadPositions(fd); errors.Is(err, sock.ErrClosed) {
			return nil
		}
		return errors.New("both ends have closed, and the connection is not closed")
	})
	transfer(2)
	m.refused(wire.Lost)
	m.say(&wire.Message{Type: wire.Drop, Seq: 3, Session: id})
	m.hear(wire.OK) // m owned it all the time
}

func TestParseRule(t *testing.T) {
	for _, s := range []string{"talk:uid=5", "*:user=collector", "a:unit=x@0.service", "a:cgroup=/a/b", "a:pidfile=/run/x", "a:pid=7", "a:gid=0"} {
		if r, err := ParseRule(s); err != nil || r.String() != s {
			t.Errorf("%q: %v, %v", s, r, err)
		}
	}
	for _, s := range []string{"", "talk", "talk:uid", "talk:uid=", "talk:uid=x", "talk:name=x", ":uid=1", "a b:uid=1", "talk:pid=-1"} {
		if r, err := ParseRule(s); err == nil {
			t.Errorf("%q: %v, want an error", s, r)
		}
	}
}

// TestAbstractSocket listens on an abstract socket, which belongs to a network namespace and has no file.
func TestAbstractSocket(t *testing.T) {
	nstest.NeedRoot(t)
	l, err := Listen("@weir-test")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen("@weir-test"); err == nil {
		t.Error("two keepers at one name")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- New(Options{}).Serve(ctx, l) }()
	hello(t, "@weir-test", "talk", "0")
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

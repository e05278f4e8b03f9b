// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// helloAs is hello from a process of another user.
func helloAs(t testing.TB, socket string, user int, service, name string) mate {
	t.Helper()
	for d := filepath.Dir(socket); len(d) > len(os.TempDir()); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	as := func(id int) {
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(id), ^uintptr(0)); e != 0 { // changes only this thread
			t.Fatal(e)
		}
	}
	as(user)
	m := func() mate { defer as(0); return connect(t, socket) }()
	m.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: service, Name: name})
	m.hear(wire.Welcome)
	return m
}

// offer asks the keeper to keep a new socket with a state, and reports whether it does.
func (m mate) offer(state []byte) (uint64, bool) {
	m.t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		m.t.Fatal(err)
	}
	defer c.Close() // the keeper has its own
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		m.t.Fatal(err)
	}
	var id uint64
	if cerr := raw.Control(func(fd uintptr) {
		if id, err = sock.Cookie(int(fd)); err == nil {
			err = m.Send(&wire.Message{Type: wire.Keep, Seq: 7, Session: id, Number: uint32(wire.Packet), State: state}, int(fd))
		}
	}); cerr != nil || err != nil {
		m.t.Fatal(cerr, err)
	}
	return id, m.ok()
}

// ok reports whether the next answer is OK. It accepts only limit errors.
func (m mate) ok() bool {
	m.t.Helper()
	msg, _, err := m.Receive()
	if err != nil || msg.Type != wire.OK && (msg.Type != wire.Error || wire.Code(msg.Number) != wire.Limit) {
		m.t.Fatalf("heard type %#x (%s), %v", uint8(msg.Type), msg.Text, err)
	}
	return msg.Type == wire.OK
}

// fill keeps sockets until the keeper rejects one.
func (m mate) fill(state []byte) (ids []uint64) {
	m.t.Helper()
	for range 10_000 {
		id, ok := m.offer(state)
		if !ok {
			return ids
		}
		ids = append(ids, id)
	}
	m.t.Fatal("the keeper takes everything")
	return nil
}

// TestSharesOfMemory fills the keeper's memory by service, by user, and by user in a shared service. Others still
// find room, and commits without growth succeed.
func TestSharesOfMemory(t *testing.T) {
	state := bytes.Repeat([]byte("x"), 32<<10)
	rules := Rules{{"*", "uid", "1001"}, {"*", "uid", "1002"}}
	for name, c := range map[string]struct {
		greedy []string // services filled by user 1001
		other  string
		user   int
	}{
		"services of one user":    {[]string{"a"}, "b", 1001},
		"services of two users":   {[]string{"a"}, "b", 1002},
		"users of one service":    {[]string{"a"}, "a", 1002},
		"a user of many services": {[]string{"a", "b", "c", "d", "e", "f"}, "g", 1002},
	} {
		t.Run(name, func(t *testing.T) {
			k, socket := run(t, Options{Allow: rules.Allow, MaxTotal: 8 << 20})
			var first mate
			var ids []uint64
			for i, v := range c.greedy {
				m := helloAs(t, socket, 1001, v, "0")
				got := m.fill(state)
				if i == 0 {
					first, ids = m, got
				}
			}
			if n := int64(len(ids) * len(state)); n < 8<<20*7/10 {
				t.Errorf("a service alone has %d bytes of %d, want 3/4", n, k.MaxTotal)
			}
			m := helloAs(t, socket, c.user, c.other, "1")
			for i := range 3 {
				if _, ok := m.offer(state); !ok {
					t.Fatalf("the other one is refused its state %d", i+1)
				}
			}
			m.fill(state)
			for _, id := range ids {
				first.say(&wire.Message{Type: wire.Commit, Seq: 8, Session: id, State: state})
				if !first.ok() {
					t.Fatal("a commit of the same size is refused, as another has come")
				}
			}
			first.say(&wire.Message{Type: wire.Drop, Seq: 9, Session: ids[0]})
			if !first.ok() {
				t.Error("drop is refused")
			}
		})
	}
}

// TestSharesOfSessions checks that sockets count per user in a service, and that charges end with the sessions.
func TestSharesOfSessions(t *testing.T) {
	rules := Rules{{"a", "uid", "1001"}, {"a", "uid", "1002"}}
	k, socket := run(t, Options{Allow: rules.Allow, MaxSessions: 4})
	m, o := helloAs(t, socket, 1001, "a", "0"), helloAs(t, socket, 1002, "a", "1")
	var ids [2][]uint64
	for i, x := range []mate{m, o} {
		if ids[i] = x.fill([]byte("state")); len(ids[i]) != 4 {
			t.Errorf("%d sessions of a user are kept, want 4", len(ids[i]))
		}
	}
	for i, x := range []mate{m, o} {
		for _, id := range ids[i] {
			x.say(&wire.Message{Type: wire.Drop, Seq: 9, Session: id})
			x.ok()
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.holdings) != 0 || k.state != 0 {
		t.Errorf("without sessions %v and %d bytes count", k.holdings, k.state)
	}
}

// TestSharesOfDescriptors checks that a service filling its share of the descriptors leaves some for another service.
func TestSharesOfDescriptors(t *testing.T) {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	_, socket := run(t, Options{})
	m, o := hello(t, socket, "a", "0"), hello(t, socket, "b", "0")
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 240, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &was)
	if n := len(m.fill(nil)); n < 100 {
		t.Errorf("a service alone keeps %d sockets of 240 descriptors", n)
	}
	if n := len(o.fill(nil)); n < 5 {
		t.Errorf("beside a full one a service keeps %d sockets", n)
	}
}

// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// slotted is a member that commits in a slot.
type slotted struct {
	mate
	slot *wire.Slot
	id   uint64
	fd   int
}

func helloSlotted(t *testing.T, socket string) slotted {
	t.Helper()
	b, err := wire.NewBoard()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	m := slotted{mate: connect(t, socket)}
	m.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: "talk", Name: "0", Number: wire.Boards}, b.FD())
	w, _ := m.hear(wire.Welcome)
	if w.Number != wire.Boards {
		t.Fatalf("the keeper has capabilities %d", w.Number)
	}
	if err := b.Size(w.Written); err != nil {
		t.Fatal(err)
	}
	m.slot = b.Allocate()
	m.fd, m.id, _ = stream(t)
	m.say(&wire.Message{Type: wire.Keep, Seq: 2, Session: m.id, Number: uint32(wire.Stream), State: []byte("kept")}, m.fd)
	m.hear(wire.OK)
	return m
}

func (m slotted) commit(state string) {
	m.t.Helper()
	if !m.slot.Commit(&wire.Message{Session: m.id, State: []byte(state)}) {
		m.t.Fatalf("no room for %q", state)
	}
}

func (m slotted) commits(index uint32) {
	m.say(&wire.Message{Type: wire.Commits, Session: m.id, Number: index, Read: m.slot.Commits()})
}

// TestSlot checks that the last commit counts when a member leaves a session, by slot or message.
func TestSlot(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(m slotted)
		want string
	}{
		"kept":              {func(slotted) {}, "kept"},
		"not said":          {func(m slotted) { m.commit("a") }, "kept"},
		"said":              {func(m slotted) { m.commit("a"); m.commits(m.slot.Index) }, "a"},
		"later":             {func(m slotted) { m.commit("a"); m.commits(m.slot.Index); m.commit("b"); m.commit("c") }, "c"},
		"then by a message": {func(m slotted) { m.commit("a"); m.commits(m.slot.Index); m.message("d"); m.commit("e") }, "d"},
		"and back": {func(m slotted) {
			m.commit("a")
			m.commits(m.slot.Index)
			m.message("d")
			m.commit("e")
			m.commits(m.slot.Index)
			m.commit("f")
		}, "f"},
		"kept again": {func(m slotted) {
			m.commit("a")
			m.commits(m.slot.Index)
			m.say(&wire.Message{Type: wire.Keep, Session: m.id, Number: uint32(wire.Stream), State: []byte("g")}, m.fd)
		}, "g"},
	} {
		t.Run(name, func(t *testing.T) {
			_, socket := run(t, Options{})
			m := helloSlotted(t, socket)
			c.do(m)
			m.say(&wire.Message{Type: wire.Leave, Seq: 9})
			m.hear(wire.OK)
			next := hello(t, socket, "talk", "0")
			next.say(&wire.Message{Type: wire.Ready, Number: 1})
			if got, _ := next.hear(wire.Give); got.Session != m.id || string(got.State) != c.want {
				t.Errorf("session %d is given with %q, want %q", got.Session, got.State, c.want)
			}
		})
	}
}

func (m slotted) message(state string) {
	m.say(&wire.Message{Type: wire.Commit, Session: m.id, State: []byte(state)})
}

// TestSlotStatus checks that status includes commits made in a slot only, and counts them.
func TestSlotStatus(t *testing.T) {
	k, socket := run(t, Options{})
	m := helloSlotted(t, socket)
	m.commit("a")
	m.commits(m.slot.Index)
	for range 10 {
		m.commit("seven b")
	}
	m.say(&wire.Message{Type: wire.Ready, Seq: 5})
	m.hear(wire.OK) // all earlier messages are read
	for range 2 {
		s := k.Report().Services[0]
		if s.Sessions[0].State != 7 || s.Counts.Commits != 11 {
			t.Errorf("%d bytes of state, %d commits, want 7 and 11", s.Sessions[0].State, s.Counts.Commits)
		}
	}
	if r := k.Report(); r.State != 7 || counted(k) != wire.SlotRoom {
		t.Errorf("%d bytes, of which %d count; want 7, and the slot's %d", r.State, counted(k), wire.SlotRoom)
	}
	m.say(&wire.Message{Type: wire.Drop, Seq: 6, Session: m.id})
	m.hear(wire.OK)
	if n := counted(k); n != 0 {
		t.Errorf("%d bytes count, and there is no session", n)
	}
}

func counted(k *Keeper) int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state
}

func TestSlotRefusals(t *testing.T) {
	_, socket := run(t, Options{MaxTotal: wire.SlotRoom - 1})
	m := helloSlotted(t, socket)
	m.commit("a")
	m.commits(m.slot.Index)
	m.refused(wire.Limit) // the slot's reservation exceeds the limit of all states
	other := hello(t, socket, "talk", "1")
	other.say(&wire.Message{Type: wire.Commits, Session: m.id})
	other.refused(wire.NoSession)
	fd, id, _ := stream(t)
	other.say(&wire.Message{Type: wire.Keep, Session: id, Number: uint32(wire.Stream)}, fd)
	other.say(&wire.Message{Type: wire.Commits, Session: id})
	other.refused(wire.Malformed) // it has no board
	none := connect(t, socket)
	none.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: "talk", Name: "2", Number: wire.Boards})
	none.refused(wire.BadSocket)
	zero, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer zero.Close()
	none.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: "talk", Name: "2", Number: wire.Boards}, int(zero.Fd()))
	none.refused(wire.BadSocket)
	none.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: "talk", Name: "2"})
	none.hear(wire.Welcome) // without a board

	_, socket = run(t, Options{})
	m = helloSlotted(t, socket)
	m.commit("a")
	m.commits(m.slot.Index)
	m.say(&wire.Message{Type: wire.Commit, Session: m.id, Flags: wire.KeepState})
	m.refused(wire.Malformed) // the base state is unknown
}

// TestSlotLost checks that a session with an unreadable slot is reset. It must not be given away with an old state.
func TestSlotLost(t *testing.T) {
	for name, spoil := range map[string]func(m slotted){
		"no such slot":      func(m slotted) { m.commits(1 << 31) },
		"another session's": func(m slotted) { m.slot.Commit(&wire.Message{Session: m.id + 1}); m.commits(m.slot.Index) },
		"goes back": func(m slotted) {
			m.say(&wire.Message{Type: wire.Commit, Session: m.id, Read: 5, State: []byte("later")})
			m.commit("a")
			m.commits(m.slot.Index)
		},
	} {
		t.Run(name, func(t *testing.T) {
			k, socket := run(t, Options{})
			m := helloSlotted(t, socket)
			spoil(m)
			m.say(&wire.Message{Type: wire.Leave, Seq: 9})
			m.hear(wire.OK)
			s := k.Report().Services[0]
			if len(s.Sessions) != 0 || s.Counts.Gaps != 1 {
				t.Errorf("%d sessions, %d that could not be gone on with; want none and 1", len(s.Sessions), s.Counts.Gaps)
			}
		})
	}
}

// TestHelloCut checks that a keeper without free descriptors accepts a member without its board.
func TestHelloCut(t *testing.T) {
	_, socket := run(t, Options{})
	b, err := wire.NewBoard()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	m := connect(t, socket)
	time.Sleep(100 * time.Millisecond) // until the keeper has accepted it
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	m.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: "talk", Name: "0", Number: wire.Boards}, b.FD())
	m.SetReadDeadline(time.Now().Add(30 * time.Second))
	w, _, err := m.Receive()
	if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); e != nil {
		t.Fatal(e)
	}
	if err != nil || w.Type != wire.Welcome || w.Number != 0 {
		t.Errorf("type %#x, capabilities %d, %q, %v; want a welcome without", uint8(w.Type), w.Number, w.Text, err)
	}
}

// TestSlotOverState checks that a slot is bounded too, for a member with a lower state limit.
func TestSlotOverState(t *testing.T) {
	k, socket := run(t, Options{MaxState: 100})
	m := helloSlotted(t, socket)
	m.commit("a")
	m.commits(m.slot.Index)
	m.commit(strings.Repeat("x", wire.SlotRoom)) // a member respecting Welcome would not
	m.say(&wire.Message{Type: wire.Ready, Seq: 5})
	m.hear(wire.OK)
	if s := k.Report().Services[0].Sessions[0]; s.State > wire.SlotRoom {
		t.Errorf("%d bytes", s.State)
	}
}

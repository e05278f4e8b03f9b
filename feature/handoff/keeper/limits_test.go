// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// keeps has a session kept, and commits states of it.
type keeps struct {
	mate
	id uint64
}

func keepOne(t *testing.T, m mate) *keeps {
	t.Helper()
	fd, id, _ := stream(t)
	m.say(&wire.Message{Type: wire.Keep, Seq: 2, Session: id, Number: uint32(wire.Stream)}, fd)
	m.hear(wire.OK)
	return &keeps{mate: m, id: id}
}

// asks sends a request with a state of so many bytes.
func (k *keeps) asks(m wire.Message, size int) {
	k.t.Helper()
	m.Seq, m.Session, m.State = 3, k.id, make([]byte, size)
	large, err := m.Spill()
	if err != nil {
		k.t.Fatal(err)
	}
	if large < 0 {
		k.say(&m)
		return
	}
	k.say(&m, large)
	unix.Close(large)
}

func (k *keeps) commit(size int) { k.t.Helper(); k.asks(wire.Message{Type: wire.Commit}, size) }

func (k *keeps) agree(change uint32) {
	k.t.Helper()
	k.say(&wire.Message{Type: wire.Agree, Seq: 4, Number: change})
	k.hear(wire.OK)
}

// limits hears the limits that a member is told of.
func (k *keeps) limits(state, sessions uint64) (change uint32) {
	k.t.Helper()
	m, _ := k.hear(wire.Limits)
	if m.Read != state || m.Written != sessions || m.Seq != 0 {
		k.t.Errorf("limits %d and %d, seq %d; want %d and %d", m.Read, m.Written, m.Seq, state, sessions)
	}
	return m.Number
}

// A larger limit of state holds for members that are connected already, which are told of it.
func TestLimitRaised(t *testing.T) {
	k, socket := run(t, Options{MaxState: 1000})
	m := keepOne(t, hello(t, socket, "talk", "0"))
	m.commit(200_000)
	m.refused(wire.Limit)
	k.Limit(Limits{State: 200_000})
	m.limits(200_000, 10_000)
	m.commit(200_000) // whether it has agreed or not
	m.hear(wire.OK)
	m.commit(200_001)
	m.refused(wire.Limit)
	k.Limit(Limits{State: 200_000, Hold: time.Minute, Grace: time.Minute, Total: 300 << 20}) // of which no member hears
	k.Limit(Limits{State: 200_000, Sessions: 7})
	m.limits(200_000, 7)
}

// A smaller one holds for a member that has agreed: what is under way is not refused. What there is already stays, and can move.
func TestLimitLowered(t *testing.T) {
	k, socket := run(t, Options{MaxState: 200_000})
	m := keepOne(t, hello(t, socket, "talk", "0"))
	k.Limit(Limits{State: 100_000})
	first := m.limits(100_000, 10_000)
	m.commit(150_000)
	m.hear(wire.OK)
	k.Limit(Limits{State: 1000})
	second := m.limits(1000, 10_000)
	m.agree(first) // behind the times
	m.commit(200_000)
	m.hear(wire.OK)
	m.commit(150_000)
	m.hear(wire.OK)
	m.agree(second)
	another := keepOne(t, m.mate)
	another.commit(1001)
	if msg, _ := m.hear(wire.Error); wire.Code(msg.Number) != wire.Limit || !strings.Contains(msg.Text, "at most 1000") {
		t.Errorf("error %d: %s", msg.Number, msg.Text)
	}
	m.commit(200_000) // as before, until it is within the limit
	m.hear(wire.OK)
	m.commit(200_001)
	m.refused(wire.Limit)
	next := hello(t, socket, "talk", "1")
	next.say(&wire.Message{Type: wire.Ready, Seq: 9, Number: 1})
	next.hear(wire.OK)
	m.asks(wire.Message{Type: wire.Transfer, Name: "1"}, 200_000)
	m.hear(wire.OK)
	give, _ := next.hear(wire.Give)
	if give.Sizes[0] != 200_000 {
		t.Errorf("a state of %d bytes is given", give.Sizes[0])
	}
	n := &keeps{mate: next, id: m.id}
	n.commit(200_000)
	n.hear(wire.OK)
	n.commit(1000)
	n.hear(wire.OK)
	n.commit(1001)
	n.refused(wire.Limit)
}

// Welcome is the first word of the keeper, also while limits change: a member takes what comes first for it.
func TestWelcomeIsFirst(t *testing.T) {
	k, socket := run(t, Options{})
	var changing sync.WaitGroup
	stop := make(chan struct{})
	changing.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				k.Limit(Limits{State: Size(1000 + i%2)})
			}
		}
	})
	defer changing.Wait()
	defer close(stop)
	for i := range 50 {
		m := connect(t, socket)
		m.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: "talk", Name: fmt.Sprint(i)})
		m.hear(wire.Welcome)
		m.Close()
	}
}

// A member that does not read holds up neither the change of limits nor others, and hears all of it when it does.
func TestLimitsUnread(t *testing.T) {
	k, socket := run(t, Options{})
	deaf := hello(t, socket, "talk", "0")
	const changes = 3000 // more than a socket holds
	for i := range changes {
		k.Limit(Limits{State: Size(1000 + i)})
	}
	other := hello(t, socket, "talk", "1")
	other.say(&wire.Message{Type: wire.Ready, Seq: 5, Number: 1})
	other.hear(wire.OK)
	for i := range changes {
		if m, _ := deaf.hear(wire.Limits); m.Read != uint64(1000+i) || m.Number != uint32(i+1) {
			t.Fatalf("change %d: limit %d, number %d", i, m.Read, m.Number)
		}
	}
}

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

// keeps is a member with one session. It commits states of it.
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

// asks sends a request with a state of size bytes.
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

// limits receives a Limits message.
func (k *keeps) limits(state, sessions uint64) (change uint32) {
	k.t.Helper()
	m, _ := k.hear(wire.Limits)
	if m.Read != state || m.Written != sessions || m.Seq != 0 {
		k.t.Errorf("limits %d and %d, seq %d; want %d and %d", m.Read, m.Written, m.Seq, state, sessions)
	}
	return m.Number
}

// TestLimitRaised checks that a larger state limit applies to connected members, and that they receive it.
func TestLimitRaised(t *testing.T) {
	k, socket := run(t, Options{MaxState: 1000})
	m := keepOne(t, hello(t, socket, "talk", "0"))
	m.commit(200_000)
	m.refused(wire.Limit)
	k.Limit(Limits{State: 200_000})
	m.limits(200_000, 10_000)
	m.commit(200_000) // agreed or not
	m.hear(wire.OK)
	m.commit(200_001)
	m.refused(wire.Limit)
	k.Limit(Limits{State: 200_000, Hold: time.Minute, Grace: time.Minute, Total: 300 << 20}) // members do not receive these limits
	k.Limit(Limits{State: 200_000, Sessions: 7})
	m.limits(200_000, 7)
}

// TestLimitLowered checks that a smaller limit applies once a member has agreed, so commits in flight succeed. Larger
// states stay, and can move.
func TestLimitLowered(t *testing.T) {
	k, socket := run(t, Options{MaxState: 200_000})
	m := keepOne(t, hello(t, socket, "talk", "0"))
	k.Limit(Limits{State: 100_000})
	first := m.limits(100_000, 10_000)
	m.commit(150_000)
	m.hear(wire.OK)
	k.Limit(Limits{State: 1000})
	second := m.limits(1000, 10_000)
	m.agree(first) // outdated
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

// TestWelcomeIsFirst checks that Welcome is the first message even while limits change, because a member expects it
// first.
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

// TestLimitsUnread checks that a member that does not read blocks neither changes of limits nor other members. It
// receives all changes later.
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

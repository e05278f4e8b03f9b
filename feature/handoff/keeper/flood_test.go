// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// log is safe to read once the keeper has ended.
type log struct {
	sync.Mutex
	bytes.Buffer
}

func (l *log) Write(b []byte) (int, error) {
	l.Lock()
	defer l.Unlock()
	return l.Buffer.Write(b)
}

func (l *log) lines() int {
	l.Lock()
	defer l.Unlock()
	return strings.Count(l.String(), "\n")
}

// TestFloodOfRefusals checks that invalid requests cause a bounded number of log lines.
func TestFloodOfRefusals(t *testing.T) {
	var l log
	_, socket := run(t, Options{Log: slog.New(slog.NewTextHandler(&l, nil))})
	m := connect(t, socket)
	for i := range 500 { // fits into the 5 s before a Hello, even on a slow machine
		m.say(&wire.Message{Type: wire.Ready, Seq: uint32(i + 1)})
		m.hear(wire.Error)
	}
	for range 200 {
		connect(t, socket).Close()
	}
	if n := l.lines(); n > 60 {
		t.Errorf("%d lines", n)
	}
}

// floods exceeds the messages in a socket by far.
const floods = 10_000

// TestFloodOfLoads checks that a member's constant load changes do not fill the queue of a member that briefly does
// not read. A full queue would end its connection. It receives the newest load.
func TestFloodOfLoads(t *testing.T) {
	_, socket := run(t, Options{})
	deaf := connect(t, socket)
	deaf.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: "talk", Name: "deaf", Number: wire.Balances})
	deaf.hear(wire.Welcome)
	m := hello(t, socket, "talk", "0")
	for i := range floods {
		m.say(&wire.Message{Type: wire.Load, Number: uint32(100 + i)})
	}
	m.say(&wire.Message{Type: wire.Load, Seq: 5, Number: 8})
	m.hear(wire.OK)
	heard := 0
	for last := uint32(0); last != 8; heard++ {
		msg, _ := deaf.hear(wire.Loads)
		if last = msg.Number; msg.Name != "0" {
			t.Fatalf("the load of %q", msg.Name)
		}
	}
	if heard > floods/2 {
		t.Errorf("%d of %d loads came", heard, floods)
	}
}

// TestFloodOfReady checks the same for an agent's queue, with a member that constantly changes its readiness.
func TestFloodOfReady(t *testing.T) {
	_, socket := run(t, Options{})
	agent := connect(t, socket)
	agent.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: "talk", Name: "@agent", Number: wire.Resumes})
	agent.hear(wire.Welcome)
	m := hello(t, socket, "talk", "0")
	for i := range floods {
		m.say(&wire.Message{Type: wire.Ready, Number: uint32(i % 2)})
	}
	m.say(&wire.Message{Type: wire.Ready, Seq: 5, Number: 0})
	m.hear(wire.OK)
	other := hello(t, socket, "talk", "1")
	for range 2 { // finally two
		for _, x := range []mate{m, other} {
			x.say(&wire.Message{Type: wire.Ready, Seq: 6, Number: 1})
			x.hear(wire.OK)
		}
	}
	heard := 0
	for last := uint32(0); last != 2; heard++ {
		msg, _ := agent.hear(wire.Members)
		last = msg.Number
	}
	if heard > floods/2 {
		t.Errorf("%d of %d changes came", heard, floods)
	}
}

// TestManyOrphans checks that finding members for orphans takes linear time. In quadratic time it once held the
// keeper's lock for minutes.
func TestManyOrphans(t *testing.T) {
	const sessions = 100_000
	now := time.Now()
	v := &service{name: "talk"}
	m := &member{name: "0", service: v, ready: true, process: &process{}, given: map[uint64]time.Time{}}
	v.members = []*member{m}
	k := New(Options{})
	for id := range uint64(sessions) {
		m.given[id] = now
	}
	for id := range uint64(sessions) {
		if k.successor(&session{id: id, service: v, member: "0"}, now) != m {
			t.Fatal("no member is found")
		}
		if took := time.Since(now); took > 30*time.Second {
			t.Fatalf("members for %d of %d orphans took %v", id, sessions, took)
		}
	}
	m.given[0] = now.Add(-2 * slowTime)
	if k.successor(&session{service: v, member: "0"}, now.Add(time.Nanosecond)) != nil {
		t.Error("one that does not answer is found")
	}
}

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

// log is read when the keeper has ended.
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

// A process that asks for nonsense costs a bounded number of log lines.
func TestFloodOfRefusals(t *testing.T) {
	var l log
	_, socket := run(t, Options{Log: slog.New(slog.NewTextHandler(&l, nil))})
	m := connect(t, socket)
	for i := range 500 { // within the 5 s of a process that has not said hello, on a slow machine, too
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

// floods is far more than a socket holds.
const floods = 10_000

// A member that says all the time how much waits for it fills the queue of no other that does not read for a moment, whose connection
// would end. This one hears the newest.
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

// Nor does one that is ready and not, all the time, fill that of an agent.
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
	for range 2 { // two at last
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

// To find members for many orphans takes time for each of them, not for each pair of them: it was minutes under the keeper's lock for
// as many.
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

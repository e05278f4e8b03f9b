// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"testing"
)

// explored explores every state within bounds, and reports each violation.
func explored(t *testing.T, b Bounds) Result {
	t.Helper()
	r, err := Run(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d states, events %v", r.States, r.Events)
	for _, v := range r.Violations {
		t.Error(v)
	}
	return r
}

func TestProtocol(t *testing.T) {
	r := explored(t, Quick)
	if r.States < 10_000 {
		t.Errorf("%d states: want at least 10,000", r.States)
	}
	for _, kind := range []string{"arrives", "lost", "packet", "move", "timeout", "kill", "start", "forget", "learn", "end", "ahead", "ask"} {
		if r.Events[kind] == 0 {
			t.Errorf("nothing of %q", kind)
		}
	}
}

func TestTwoKills(t *testing.T) {
	explored(t, Bounds{Moves: 1, Packets: 1, Kills: 2, Timeouts: 1})
}

// TestForgets makes the load balancer forget a flow and its epoch. The source remembers its moves, and starts more.
func TestForgets(t *testing.T) {
	b := Bounds{Moves: 2, Packets: 1, Kills: 1, Timeouts: 1, Forgets: 1}
	if !testing.Short() {
		explored(t, b)
		return
	}
	b.Kills = 0
	explored(t, b)
	b.Kills, b.Timeouts = 1, 0
	explored(t, b)
}

// TestWaits explores sources that wait for the load balancer, for want of a nonce.
func TestWaits(t *testing.T) {
	b := Quick
	b.Waits = true
	r := explored(t, b)
	if r.Events["ahead"] > 0 {
		t.Errorf("%d went ahead", r.Events["ahead"])
	}
}

// TestParks explores buffering at the source.
func TestParks(t *testing.T) {
	for _, waits := range []bool{false, true} {
		b := Bounds{Moves: 1, Packets: 2, Kills: 1, Timeouts: 1, Forgets: 1, Parks: true, Waits: waits}
		explored(t, b)
	}
}

// TestFaults checks that the explorer finds every fault.
func TestFaults(t *testing.T) {
	for f := openSource; f <= lastFault; f++ {
		r, err := run(t.Context(), Bounds{Moves: 1, Packets: 2, Kills: 1, Timeouts: 1, Forgets: 1}, f)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Violations) == 0 {
			t.Errorf("fault %d: %d states, and nothing is wrong", f, r.States)
			continue
		}
		t.Logf("fault %d: %s after %q", f, r.Violations[0].What, r.Violations[0].Trace)
	}
}

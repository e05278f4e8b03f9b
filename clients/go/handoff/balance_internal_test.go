// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"fmt"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

func TestBalancer(t *testing.T) {
	with := func(loads map[string]uint32) *Balancer {
		return &Balancer{Member: &Member{loads: loads}, Threshold: 4, Gain: 3}
	}
	for _, c := range []struct {
		name    string
		loads   map[string]uint32
		waiting int
		want    string
	}{
		{"nobody else", nil, 100, ""},
		{"little waits", map[string]uint32{"1": 0}, 3, ""},
		{"an idle member", map[string]uint32{"1": 0}, 4, "1"},
		{"all have as much", map[string]uint32{"1": 4, "@b": 3}, 5, ""},
		{"less by the gain", map[string]uint32{"1": 4, "@b": 2}, 5, "@b"},
		{"the least", map[string]uint32{"1": 2, "2": 1, "@b": 2}, 9, "2"},
		{"the nearer of two", map[string]uint32{"@a": 0, "1": 0, "@b": 0}, 9, "1"},
		{"an absent member", map[string]uint32{"@b": ^uint32(0)}, 1000, ""},
	} {
		if got := with(c.loads).Where(c.waiting); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// TestBalancerCountsWhatItGave checks that a given session counts at once, until it shows in the
// other's load or forgetAfter has passed.
func TestBalancerCountsWhatItGave(t *testing.T) {
	for {
		begin := time.Now()
		wrong := countsWhatItGave()
		if time.Since(begin) >= forgetAfter {
			continue // the machine stalled, and given sessions may be forgotten
		}
		for _, w := range wrong {
			t.Error(w)
		}
		break
	}
	b := &Balancer{Member: &Member{loads: map[string]uint32{"1": 0}}, Threshold: 4, Gain: 3}
	for b.Where(10) != "" {
	}
	nstest.Until(t, "old gifts no longer count", func() bool { return b.Where(6) == "1" })
}

// countsWhatItGave returns the faults of a balancer before it forgets anything.
func countsWhatItGave() (wrong []string) {
	m := &Member{loads: map[string]uint32{"1": 0}}
	b := &Balancer{Member: m, Threshold: 4, Gain: 3}
	n := 0
	for waiting := 10; b.Where(waiting) != ""; waiting-- {
		n++
	}
	if n != 4 { // 10 - 0, 9 - 1, 8 - 2, 7 - 3; the difference 6 - 4 is too small
		wrong = append(wrong, fmt.Sprintf("%d were given of 10", n))
	}
	b.GaveNot("1")
	if b.Where(6) != "1" {
		wrong = append(wrong, "a failed transfer still counts")
	}
	m.setLoad("1", 1) // the other has received one: from now on its report counts
	if b.Where(6) != "1" {
		wrong = append(wrong, "a session in the other's load counts twice")
	}
	return wrong
}

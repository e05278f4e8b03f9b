// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"errors"
	"math"
	"strings"
	"testing"
)

// handMade is a scenario of 10 s with the attack in its last 5 s, under a limit of 10 pps.
var handMade = Scenario{Name: "hand_made", Limit: 10, From: 5 * second, To: 10 * second, build: func(*builder) {}}

// judged evaluates packets with times from the trace's beginning.
func judged(packets []Packet, verdicts string) Outcome {
	t := handMade.Trace(1)
	passed := make([]bool, len(packets))
	for i := range packets {
		packets[i].At += t.Start()
		passed[i] = verdicts[i] == '+'
	}
	j := newEvaluator(handMade, t)
	j.Add(packets[:len(packets)/2], passed)
	j.Add(packets[len(packets)/2:], passed[len(packets)/2:])
	return j.outcome()
}

func packet(at float64, source uint32, c Class) Packet {
	return Packet{At: uint64(at * float64(second)), Src: Source{Identity: source}, Class: c}
}

// same compares numbers, with NaN equal to NaN.
func same(a, b float64) bool { return math.Abs(a-b) < 1e-9 || math.IsNaN(a) && math.IsNaN(b) }

func TestJudgeShares(t *testing.T) {
	o := judged([]Packet{
		packet(1, 1, Established), // before the attack: not evaluated
		packet(2, 9, Mimic),
		packet(5, 1, Established), // at its first moment: evaluated
		packet(6, 1, Established),
		packet(6.1, 2, Established),
		packet(6.2, 2, Established),
		packet(6.3, 3, Newcomer),
		packet(6.4, 3, Newcomer),
		packet(6.5, 3, Newcomer),
		packet(7, 9, Attack),
		packet(7.1, 9, Attack),
		packet(10, 1, Established), // after its end
		packet(10.1, 9, Attack),
	}, "-+"+"++-+"+"+--"+"+-"+"-+")
	if !same(o.LegitKept, 3./4) || !same(o.NewcomersKept, 1./3) || !same(o.AttackAcceptedPPS, 1./5) {
		t.Errorf("%+v", o)
	}
	if want := (1.5 * 1.5) / (2 * 1.25); !same(o.Jain, want) || !same(o.MinClient, 0.5) {
		t.Errorf("Jain %v, want %v; least client %v", o.Jain, want, o.MinClient)
	}
	if o.Offered != [4]int{4, 3, 2, 0} || o.Accepted != [4]int{3, 1, 1, 0} {
		t.Errorf("offered %v, accepted %v", o.Offered, o.Accepted)
	}
}

func TestJudgeNothing(t *testing.T) {
	o := judged(nil, "")
	if !math.IsNaN(o.LegitKept) || !math.IsNaN(o.NewcomersKept) || !math.IsNaN(o.Jain) || !math.IsNaN(o.MinClient) {
		t.Errorf("got shares without packets: %+v", o)
	}
	if o.AttackAcceptedPPS != 0 || o.AcceptedOverLimitWorstSecond != 0 {
		t.Errorf("packets passed, but none were offered: %+v", o)
	}
}

// If all clients are shut out, the least share is 0, not NaN.
func TestJudgeAllShutOut(t *testing.T) {
	o := judged([]Packet{packet(6, 1, Established), packet(6, 2, Established)}, "--")
	if !same(o.LegitKept, 0) || !same(o.MinClient, 0) || !math.IsNaN(o.Jain) {
		t.Errorf("%+v", o)
	}
	o = judged([]Packet{packet(6, 1, Established), packet(6, 2, Established), packet(6, 3, Established)}, "--+")
	if !same(o.Jain, 1./3) {
		t.Errorf("one of three sources has all packets: Jain %v", o.Jain)
	}
}

// The worst second is any second: across full seconds, before the attack, with one end only.
func TestJudgeWorstSecond(t *testing.T) {
	at := func(times ...float64) (all []Packet) {
		for _, x := range times {
			all = append(all, packet(x, 9, Attack))
		}
		return all
	}
	for _, c := range []struct {
		times    []float64
		verdicts string
		want     float64
	}{
		{[]float64{6}, "-", 0},
		{[]float64{6}, "+", 0.1},
		{[]float64{6, 6, 6.1}, "+++", 0.3},
		{[]float64{6, 6, 6.1}, "+-+", 0.2},
		{[]float64{6.9, 7.1, 7.85}, "+++", 0.3},                    // no clock second has three
		{[]float64{6, 7, 8}, "+++", 0.1},                           // a second apart is not within one
		{[]float64{6, 6.999, 7, 7.5, 7.998}, "+++++", 0.4},         // after 6.998
		{[]float64{1, 1, 1, 1, 6}, "+++++", 0.4},                   // clients alone count too
		{[]float64{10, 10.5, 11, 11.2, 11.3, 11.4}, "++++++", 0.5}, // (10.4, 11.4]
		{[]float64{6, 6.2, 6.4, 6.6, 6.8, 7, 7.2}, "+-+-+-+", 0.3}, // (6.2, 7.2]
	} {
		if got := judged(at(c.times...), c.verdicts).AcceptedOverLimitWorstSecond; !same(got, c.want) {
			t.Errorf("%v %s: %v, want %v", c.times, c.verdicts, got, c.want)
		}
	}
}

// bucket is a token bucket for the total, the baseline for guards.
type bucket struct {
	at     uint64
	tokens float64
	rate   float64
	depth  float64
}

func (b *bucket) Decide(batch []Packet, verdicts []bool) error {
	for i, p := range batch {
		if b.at != 0 {
			b.tokens = min(b.depth, b.tokens+float64(p.At-b.at)/float64(second)*b.rate)
		}
		b.at = p.At
		verdicts[i] = b.tokens >= 1
		if verdicts[i] {
			b.tokens--
		}
	}
	return nil
}

// A token bucket keeps the limit and shuts legitimate clients out. The outcome shows both.
func TestRunTokenBucket(t *testing.T) {
	s, err := Lookup("spoofed_50k")
	if err != nil {
		t.Fatal(err)
	}
	o, err := Run(s, 1, &bucket{rate: 1000, depth: 120, tokens: 120})
	if err != nil {
		t.Fatal(err)
	}
	if o.AcceptedOverLimitWorstSecond > 1.12 || o.AcceptedOverLimitWorstSecond < 1.0 {
		t.Errorf("worst second: %v of the limit; a bucket of 120 allows 1.12", o.AcceptedOverLimitWorstSecond)
	}
	if o.LegitKept > 0.05 || math.Abs(o.AttackAcceptedPPS-1000) > 30 {
		t.Errorf("a token bucket knows no clients: kept %v of their packets and %v pps of the attack", o.LegitKept, o.AttackAcceptedPPS)
	}
}

type broken struct{}

func (broken) Decide([]Packet, []bool) error { return errors.New("the program is gone") }

func TestRunReportsWhere(t *testing.T) {
	_, err := Run(All()[1], 7, broken{})
	if err == nil || !strings.Contains(err.Error(), "scenario single_flow, seed 7: the program is gone") {
		t.Error(err)
	}
}

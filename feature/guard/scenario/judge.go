// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"fmt"
	"math"
	"time"
)

// Outcome is the evaluation of the verdicts on a scenario's trace. Shares are between 0 and 1, or
// NaN without packets. All fields except AcceptedOverLimitWorstSecond count from the attack's
// beginning plus WarmUp to its end.
type Outcome struct {
	LegitKept     float64 // passed share of established clients' packets
	NewcomersKept float64 // passed share of newcomers' packets

	AttackAcceptedPPS float64
	// AcceptedOverLimitWorstSecond is the maximum number of packets passed within one second
	// anywhere in the trace, divided by the limit. The second includes one of its ends.
	AcceptedOverLimitWorstSecond float64

	// Jain's index of fairness over the established clients' passed shares (1: all equal, 1/n: one
	// has everything), and the least share.
	Jain, MinClient float64

	Offered, Accepted [4]int // packets, by class
}

// evaluator evaluates a trace with its verdicts incrementally.
type evaluator struct {
	limit    float64
	from, to uint64 // virtual time
	seconds  float64

	offered, accepted [classes]int
	perClient         map[Source]*share
	window            []uint64 // times of packets passed within the last second, oldest first
	worst             int
}

type share struct{ offered, accepted int }

// newEvaluator evaluates a scenario with trace t.
func newEvaluator(s Scenario, t *Trace) *evaluator {
	return &evaluator{limit: float64(s.Limit), from: t.start + uint64(s.From+s.WarmUp), to: t.start + uint64(s.To),
		seconds: (s.To - s.From - s.WarmUp).Seconds(), perClient: map[Source]*share{}}
}

// Add evaluates the next packets of the trace. There are at least as many verdicts as packets.
func (j *evaluator) Add(packets []Packet, verdicts []bool) {
	for i := range packets {
		p, passed := &packets[i], verdicts[i]
		if passed {
			j.pass(p.At)
		}
		if p.At < j.from || p.At >= j.to {
			continue
		}
		j.offered[p.Class]++
		if passed {
			j.accepted[p.Class]++
		}
		if p.Class == Established {
			j.client(p.Src, passed)
		}
	}
}

// pass counts the packets passed within the second ending at at.
func (j *evaluator) pass(at uint64) {
	j.window = append(j.window, at)
	first := 0
	for j.window[first]+uint64(time.Second) <= at {
		first++
	}
	j.window = j.window[first:]
	j.worst = max(j.worst, len(j.window))
}

func (j *evaluator) client(s Source, passed bool) {
	c := j.perClient[s]
	if c == nil {
		c = &share{}
		j.perClient[s] = c
	}
	c.offered++
	if passed {
		c.accepted++
	}
}

// outcome returns the outcome so far.
func (j *evaluator) outcome() Outcome {
	o := Outcome{
		LegitKept:                    ratio(j.accepted[Established], j.offered[Established]),
		NewcomersKept:                ratio(j.accepted[Newcomer], j.offered[Newcomer]),
		AttackAcceptedPPS:            float64(j.accepted[Attack]) / j.seconds,
		AcceptedOverLimitWorstSecond: float64(j.worst) / j.limit,
		Offered:                      j.offered, Accepted: j.accepted,
		Jain: math.NaN(), MinClient: math.NaN(),
	}
	var sum, squares float64
	for _, c := range j.perClient {
		x := ratio(c.accepted, c.offered)
		sum += x
		squares += x * x
		if !(o.MinClient <= x) {
			o.MinClient = x
		}
	}
	if squares > 0 {
		o.Jain = sum * sum / (squares * float64(len(j.perClient)))
	}
	return o
}

func ratio(part, whole int) float64 {
	if whole == 0 {
		return math.NaN()
	}
	return float64(part) / float64(whole)
}

// batch is the number of packets decided at once: few enough for a CPU's cache.
const batch = 4096

// Run lets a limiter decide a scenario's trace for a seed, and evaluates it. It returns the
// limiter's error.
func Run(s Scenario, seed uint64, l Limiter) (Outcome, error) {
	t := s.Trace(seed)
	j := newEvaluator(s, t)
	packets, verdicts := make([]Packet, batch), make([]bool, batch)
	for {
		n := t.Next(packets)
		if n == 0 {
			return j.outcome(), nil
		}
		if err := l.Decide(packets[:n], verdicts[:n]); err != nil {
			return Outcome{}, fmt.Errorf("scenario %s, seed %d: %w", s.Name, seed, err)
		}
		j.Add(packets[:n], verdicts[:n])
	}
}

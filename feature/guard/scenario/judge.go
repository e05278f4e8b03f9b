// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"fmt"
	"math"
	"time"
)

// Outcome is what the verdicts on one scenario's trace come to. Shares are between 0 and 1, and NaN if there was
// nothing to share. All but AcceptedOverLimitWorstSecond are of the time from the attack's
// begin, and Settle, to its end.
type Outcome struct {
	LegitKept     float64 // of the packets of established clients, the share that passed
	NewcomersKept float64 // of newcomers'

	AttackAcceptedPPS float64
	// AcceptedOverLimitWorstSecond is how many packets passed within any one second of the whole trace, at most,
	// over the limit. The second includes one of its ends.
	AcceptedOverLimitWorstSecond float64

	// Of established clients, by the share of its packets of each that passed: Jain's index of fairness (1: all are
	// equal, 1/n: one has everything), and the least.
	Jain, MinClient float64

	Offered, Accepted [4]int // packets, by class
}

// evaluator takes in a trace with its verdicts, as it comes.
type evaluator struct {
	limit    float64
	from, to uint64 // virtual time
	seconds  float64

	offered, accepted [classes]int
	perClient         map[Source]*share
	window            []uint64 // when those passed that did so within the last second, oldest first
	worst             int
}

type share struct{ offered, accepted int }

// newEvaluator judges a scenario whose trace is t.
func newEvaluator(s Scenario, t *Trace) *evaluator {
	return &evaluator{limit: float64(s.Limit), from: t.start + uint64(s.From+s.WarmUp), to: t.start + uint64(s.To),
		seconds: (s.To - s.From - s.WarmUp).Seconds(), perClient: map[Source]*share{}}
}

// Add takes in what comes next of the trace; verdicts are at least as many as packets.
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

// pass counts those that passed within the second that ends with at.
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

// outcome is what was taken in until now.
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

// batch is how many packets a limiter decides at once: few enough to stay in a CPU's cache.
const batch = 4096

// Run has a limiter decide a scenario's trace for a seed, and judges it. The error is the limiter's.
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

// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"slices"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/quarantine"
)

// counters count since the agent's start. a.mu guards them.
type counters struct {
	out, in, back, discarded uint64
	bytes                    uint64
	rejected                 map[string]uint64
	transferTimes            []time.Duration // ring of the latest
	stood                    []time.Duration
	transferSum, stoodAll    time.Duration // totals
	at                       int
}

const recent = 4096 // number of moves with kept times

// Status is an agent's state and counters.
type Status struct {
	Backend      string          `json:"backend"`
	LB           bool            `json:"lb_connected"`
	LBRejects    string          `json:"lb_rejects,omitempty"`    // why the load balancer rejects this backend
	TimeoutError string          `json:"timeout_error,omitempty"` // why the timeout does not fit the load balancer
	Keeper       bool            `json:"keeper_connected"`
	Peers        map[string]bool `json:"peers"` // name → connected
	// Silent has the connected but silent agents, with the duration in seconds. The load balancer's agent has the
	// name "".
	Silent      map[string]float64 `json:"silent_seconds,omitempty"`
	Sending     int                `json:"sending"`
	Receiving   int                `json:"receiving"`
	Quarantined int                `json:"quarantined"` // sessions in quarantine: under way, or arrived without a sent packet
	Out         uint64             `json:"moved_out"`
	In          uint64             `json:"moved_in"`
	Returned    uint64             `json:"returned"`  // moves that ended at their source
	Discarded   uint64             `json:"discarded"` // abandoned arrivals
	Bytes       uint64             `json:"bytes_out"`
	Draining    bool               `json:"draining"`
	Blocked     []Blocked          `json:"blocked,omitempty"`  // sessions that block the drain
	Unserved    []string           `json:"unserved,omitempty"` // services without a server here: the load balancer sends no new flows for them
	Rejected    map[string]uint64  `json:"rejected"`           // by failed operation
	// Transfer is the duration of moves from here: from the member's release of the session until the other backend
	// has it. Stopped is the part with the session's packets blocked.
	Transfer   Times             `json:"transfer"`
	Stopped    Times             `json:"stopped"`
	Quarantine quarantine.Counts `json:"quarantine"`
	Stuck      []Stuck           `json:"stuck,omitempty"` // stuck sessions, of both directions

	Certificate *peer.Certificate `json:"certificate,omitempty"` // of the agent
}

// Times is a distribution: quantiles of the latest moves, count and sum of all.
type Times struct {
	Count uint64        `json:"count"`
	Sum   time.Duration `json:"sum_ns"`
	P50   time.Duration `json:"p50_ns"`
	P99   time.Duration `json:"p99_ns"`
	Max   time.Duration `json:"max_ns"`
}

func newTimes(latest []time.Duration, sum time.Duration, count uint64) Times {
	t := Times{Count: count, Sum: sum}
	sorted := slices.Sorted(slices.Values(latest))
	if n := len(sorted); n > 0 {
		t.P50, t.P99, t.Max = sorted[n/2], sorted[n*99/100], sorted[n-1]
	}
	return t
}

// latestTimes are the times of the latest moves from here. Measurements need them, because distributions of several
// agents cannot be merged.
type latestTimes struct {
	Transfer []time.Duration `json:"transfer_ns"`
	Stopped  []time.Duration `json:"stopped_ns"`
}

func (a *Agent) latest() (latestTimes, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return latestTimes{Transfer: slices.Clone(a.stats.transferTimes), Stopped: slices.Clone(a.stats.stood)}, nil
}

// Status returns the agent's status.
func (a *Agent) Status() (Status, error) {
	g, err := a.quarantine.Counts()
	if err != nil {
		return Status{}, err
	}
	quarantined, err := a.quarantine.Entries()
	stuck, blocked := a.stuck(time.Now()), a.blockedNow()
	a.mu.Lock()
	defer a.mu.Unlock()
	s := Status{Backend: a.o.Name, Certificate: a.o.TLS.Certificate(), LB: a.lb.conn() != nil, LBRejects: a.unwanted, Keeper: a.known.Load().kept(), Peers: map[string]bool{}, Stuck: stuck, Blocked: blocked, Draining: a.weight < a.o.Registration.Weight, Unserved: slices.Clone(a.unserved), Sending: len(a.sending), Receiving: len(a.receiving), Quarantined: quarantinedNow(quarantined),
		Out: a.stats.out, In: a.stats.in, Returned: a.stats.back, Discarded: a.stats.discarded, Bytes: a.stats.bytes,
		Rejected: map[string]uint64{}, Transfer: newTimes(a.stats.transferTimes, a.stats.transferSum, a.stats.out), Stopped: newTimes(a.stats.stood, a.stats.stoodAll, a.stats.out), Quarantine: g}
	if err := a.tooPatient(); err != nil {
		s.TimeoutError = err.Error()
	}
	for k, v := range a.stats.rejected {
		s.Rejected[k] = v
	}
	silent := func(name string, c *peer.Conn) {
		if c == nil {
			return
		}
		if d := c.Silence(probeEvery); d > 0 {
			if s.Silent == nil {
				s.Silent = map[string]float64{}
			}
			s.Silent[name] = d.Seconds()
		}
	}
	silent("", a.lb.conn())
	for _, k := range a.known.Load().links {
		s.Peers[k.to.Name] = k.conn() != nil
		silent(k.to.Name, k.conn())
	}
	return s, err
}

// askKeeper limits the status's wait for the keeper.
const askKeeper = 2 * time.Second

// blockedNow returns the sessions that block a drain. It returns none without a drain or a keeper's answer.
func (a *Agent) blockedNow() []Blocked {
	if n, _ := a.asked.count(); n == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), askKeeper)
	defer cancel()
	r, err := handoff.Status(ctx, a.o.Keeper)
	if err != nil {
		return nil // the status reports the keeper anyway
	}
	return a.blocked(r, time.Now())
}

// quarantinedNow counts the sessions under way.
func quarantinedNow(all []quarantine.Entry) (n int) {
	for _, e := range all {
		if e.State != quarantine.Left {
			n++
		}
	}
	return n
}

// refused counts and logs a failed operation.
func (a *Agent) refused(what string, err error) {
	a.o.Log.Warn("operation failed", "operation", what, "err", err)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stats.rejected[what]++
}

// moved counts a session that has moved to another backend.
func (a *Agent) moved(s *sending) {
	now := time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stats.out++
	a.stats.bytes += uint64(len(s.state))
	if len(a.stats.transferTimes) < recent {
		a.stats.transferTimes, a.stats.stood = append(a.stats.transferTimes, 0), append(a.stats.stood, 0)
	}
	a.stats.transferTimes[a.stats.at], a.stats.stood[a.stats.at] = now.Sub(s.since), now.Sub(s.stopped)
	a.stats.transferSum += now.Sub(s.since)
	a.stats.stoodAll += now.Sub(s.stopped)
	a.stats.at = (a.stats.at + 1) % recent
}

func (a *Agent) arrived(*receiving) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stats.in++
}

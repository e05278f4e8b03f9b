// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"time"

	"github.com/weir-project/weir/feature"
)

const watchEvery = 500 * time.Millisecond

// split reports whether clients' packets pass both load balancers, and whether the two are apart. They are apart if packets pass
// here without a connection to the partner, while agents known from the partner are not connected here.
func (a *Agent) split() (both, apart bool) {
	a.mu.Lock()
	strays := false // agents that were at the partner and have not connected here
	for n, m := range a.members {
		strays = strays || m.word != nil && m.word.Connected && a.backends[n] == nil
	}
	a.mu.Unlock()
	d := a.pair
	d.mu.Lock()
	defer d.mu.Unlock()
	both = d.carries() && d.conn != nil && d.word != nil && d.word.Carries
	return both, d.carries() && d.conn == nil && d.word != nil && strays
}

func (a *Agent) pairStatus() *PairStatus {
	if a.pair == nil {
		return nil
	}
	_, apart := a.split()
	d := a.pair
	d.mu.Lock()
	defer d.mu.Unlock()
	s := &PairStatus{Name: a.o.Partner.Name, Connected: d.conn != nil, Carries: d.carries(), Apart: apart, Told: d.told.Load(), Heard: d.heard.Load(),
		Seconds: time.Duration(d.splitTime.Load()).Seconds(), Dropped: d.splitDropped.Load()}
	switch {
	case d.conn != nil:
		s.Silent = d.conn.Silence(pingEvery).Seconds()
	case d.lost.IsZero():
		s.Silent = -1
	default:
		s.Silent = time.Since(d.lost).Seconds()
	}
	if d.word != nil && d.conn != nil {
		s.Agents, s.There = d.word.Agents, d.word.Carries
	}
	return s
}

// watchPair tracks packets of clients here, and counts losses while the load balancers are split or apart.
func (a *Agent) watchPair(ctx context.Context) {
	d := a.pair
	before, _ := a.f.Counts() // the next turn reads it again
	carried, at := false, time.Now()
	for range (feature.Loop{Every: watchEvery, Later: true}).Turns(ctx) {
		now, err := a.f.Counts()
		if err != nil {
			continue
		}
		if now.In != before.In {
			d.carriesSince.Store(time.Now().UnixNano())
		}
		if c := d.carries(); c != carried {
			carried = c
			wake(d.backends)
		}
		if both, apart := a.split(); both || apart {
			d.splitTime.Add(int64(time.Since(at)))
			d.splitDropped.Add(now.Mute + now.NoBackend + now.NoReset - before.Mute - before.NoBackend - before.NoReset)
		}
		before, at = now, time.Now()
	}
}

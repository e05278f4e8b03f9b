// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// beat is the time between two messages of a router during the restart.
const beat = 500 * time.Millisecond

// restarts kills the first collector of every way at the same moment and starts it again, while all routers
// send. The losses of its own routers are the price of the restart. Lost records and ended sessions of the
// other collector's routers are collateral.
func (x *experiment) restarts(ctx context.Context) error {
	x.say("killing and restarting one of the two collectors of each way, under traffic")
	x.epoch++
	lost := map[string][]int64{}
	for _, y := range x.ways {
		lost[y.name] = y.lost()
	}
	back := make(chan error, len(x.ways))
	var all sync.WaitGroup
	for i := range x.ways {
		all.Go(func() { back <- x.killed(ctx, x.ways[i]) })
	}
	go func() { all.Wait(); close(back) }()
	err := x.meanwhile(ctx, back)
	if err != nil {
		return err
	}
	if err := x.awaitCounts(ctx); err != nil {
		return err
	}
	for _, y := range x.ways {
		dead, alive := 0, 1
		own, _ := x.missing(y, &dead)
		other, surplus := x.missing(y, &alive)
		now := y.lost()
		sessions := now[alive] - lost[y.name][alive]
		x.result.Set("restart_lost_"+y.name, float64((own[0]+other[0])/records))
		x.result.Set("restart_sessions_"+y.name, float64(now[dead]-lost[y.name][dead]))
		collateral := float64(int64(other[0]/records+other[1]+surplus) + sessions)
		x.result.Set("restart_collateral_"+y.name, collateral)
		if y.name == weir {
			x.result.Set("restart_collateral", collateral)
		}
		if collateral > 0 {
			x.result.Note("restart, %s: the other collector's routers lost %d flow records, %d routes, %d sessions; %d records in excess", y.name, other[0], other[1], sessions, surplus)
		}
	}
	return nil
}

// nfacctd 1.7.7 crashes at flow records from routers while it opens their BMP sessions. It binds its UDP
// socket 5 s after its start, never sooner. Its routers may therefore send until shortly before.
const (
	flowing  = iota // routers of the collector send
	hopeless        // they do not, and unsent records count as lost: no socket exists for them
	waiting         // they do not, and nothing counts: the socket exists, but their sessions are not up
)

const untilHopeless = 3 * time.Second

// killed restarts the first collector of a way, and waits until its routers are up again and their flows
// counted.
func (x *experiment) killed(ctx context.Context, y *way) error {
	begin := time.Now()
	stop := time.AfterFunc(untilHopeless, func() { y.flows.CompareAndSwap(flowing, hopeless) })
	defer stop.Stop()
	before := y.ups(0)
	if err := x.restart(ctx, y, 0); err != nil {
		return err
	}
	if y.name == weir {
		if err := x.service.Admitted(ctx, returnLimit); err != nil {
			return err
		}
	}
	y.flows.Store(waiting)
	err := x.reopened(ctx, y, before)
	y.flows.Store(flowing)
	x.result.Set("restart_seconds_"+y.name, time.Since(begin).Seconds())
	return err
}

// ups returns the number of logged Peer Ups of each router of a collector.
func (y *way) ups(collector int) map[*lane]int {
	ups := map[*lane]int{}
	for _, l := range y.lanes {
		if l.collector == collector {
			ups[l] = y.tally.countUps(l.dev.Addr)
		}
	}
	return ups
}

// reopened waits until each router has more logged Peer Ups than before.
func (x *experiment) reopened(ctx context.Context, y *way, before map[*lane]int) error {
	for begin := time.Now(); ; {
		up := 0
		for l, n := range before {
			if y.tally.countUps(l.dev.Addr) > n {
				up++
			}
		}
		if up == len(before) {
			return nil
		}
		if time.Since(begin) > countLimit {
			return fmt.Errorf("%s: %d of %d routers of the restarted collector are up again after %s", y.name, up, len(before), countLimit)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// meanwhile sends from all routers until every way is back. Every IPFIX message includes its template. Lost
// records are then undelivered records, and not records a new collector cannot decode yet.
func (x *experiment) meanwhile(ctx context.Context, back <-chan error) error {
	var failed error
	for {
		for _, y := range x.ways {
			if err := x.sweep(ctx, y, true); err != nil {
				return errors.Join(failed, err)
			}
		}
		beat := time.NewTimer(beat)
	wait:
		for {
			select {
			case err, more := <-back:
				if !more {
					return failed
				}
				failed = errors.Join(failed, err)
			case <-beat.C:
				break wait
			}
		}
	}
}

// awaitCounts waits until all records for the untouched collectors are counted, or no more arrive.
func (x *experiment) awaitCounts(ctx context.Context) error {
	alive := 1
	for begin := time.Now(); time.Since(begin) < countLimit; {
		short := 0
		for _, y := range x.ways {
			missing, _ := x.missing(y, &alive)
			short += missing[0] + missing[1]
		}
		// The restarted collectors need time to count their records: two of nfacctd's write intervals.
		if short == 0 && time.Since(begin) > 2*time.Second {
			return nil
		}
		x.push(ctx)
		if err := pause(ctx, 200*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// lost returns the number of ended sessions by collector.
func (y *way) lost() []int64 {
	n := make([]int64, collectorsEach)
	for _, l := range y.lanes {
		n[l.collector] += l.lost.Load()
	}
	return n
}

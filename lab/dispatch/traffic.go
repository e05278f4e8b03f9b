// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// clients is the number of parallel clients, so no CPU idles waiting for an answer.
const clients = 6

// lane is a site with one way to query it: directly, or by weir's bindings.
type lane struct {
	*site
	draw func(r *rand.Rand, tcp bool) (t target, service int)
}

func straight(s *site) lane {
	return lane{s, func(r *rand.Rand, tcp bool) (target, int) {
		service := r.IntN(s.services/2) * 2
		if tcp {
			service++
		}
		return ownTarget(service), service
	}}
}

func bound(s *site, all *set) lane {
	return lane{s, func(r *rand.Rand, tcp bool) (target, int) {
		i := r.IntN(len(all.hosts)/2) * 2
		if tcp {
			i++
		}
		return at(all.hosts[i], boundPort, tcp), all.service(i)
	}}
}

// round queries random services for a while and returns the µs for each answer.
func (x *experiment) round(l lane, tcp bool, part int) (float64, error) {
	var wg sync.WaitGroup
	var answers, wrong atomic.Int64
	var mu sync.Mutex
	var failed error
	begin := time.Now()
	for n := range clients {
		wg.Go(func() {
			err := l.ns.Do(func() error {
				c, err := newClient()
				if err != nil {
					return err
				}
				defer c.close()
				r := x.rand("traffic", l.name, tcp, part, n)
				for time.Since(begin) < x.roundTime {
					t, want := l.draw(r, tcp)
					got, err := c.ask(t)
					if err != nil || got != want {
						wrong.Add(1)
						x.result.Note("%s: service %d answered, want %d (%v)", t, got, want, err)
					}
					if err != nil {
						return nil // queries after this round are repeated
					}
					answers.Add(1)
				}
				return nil
			})
			if err != nil {
				mu.Lock()
				failed = err
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	took := time.Since(begin)
	x.wrong += int(wrong.Load())
	x.asked += int(answers.Load())
	if failed == nil && answers.Load() == 0 {
		failed = fmt.Errorf("no answers")
	}
	return float64(took.Microseconds()) / float64(answers.Load()), failed
}

// measureTraffic sets the end-to-end cost of connections and datagrams, with weir and without.
func (x *experiment) measureTraffic(ctx context.Context, plain, steered lane) error {
	x.say("connections and datagrams end to end, without steering and with weir in turn")
	lanes := []lane{plain, steered}
	costs := map[bool][2][]float64{}
	for n := range x.trafficRounds {
		for _, tcp := range []bool{true, false} {
			pair := costs[tcp]
			for k := range lanes {
				i := (n + k) % 2 // alternates the first one
				us, err := x.round(lanes[i], tcp, n)
				if err != nil {
					return err
				}
				pair[i] = append(pair[i], us)
			}
			costs[tcp] = pair
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
	}
	for name, tcp := range map[string]bool{"connect": true, "datagram": false} {
		x.result.Set("us_"+name+"_plain", median(costs[tcp][0]))
		x.result.Set("us_"+name+"_weir", median(costs[tcp][1]))
		x.result.Set("overhead_"+name+"_ratio", medianRatio(costs[tcp][1], costs[tcp][0]))
	}
	return nil
}

// askSome queries n random bindings of the whole set, and counts wrong and missing answers.
func (x *experiment) askSome(s *site, all *set, n int) error {
	return s.ns.Do(func() error {
		c, err := newClient()
		if err != nil {
			return err
		}
		defer c.close()
		r := x.rand("ask", n)
		for failures := 0; n > 0 && failures < 10; n-- {
			i := r.IntN(len(all.hosts))
			t := at(all.hosts[i], boundPort, serviceProto(all.service(i)) == unix.IPPROTO_TCP)
			got, err := c.ask(t)
			x.asked++
			if err != nil || got != all.service(i) {
				x.wrong++
				failures++
				x.result.Note("%s: service %d answered, want %d (%v)", t, got, all.service(i), err)
			}
		}
		return nil
	})
}

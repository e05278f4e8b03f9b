// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

// Fast sinks start in a moment, so hundreds of restarts fit into a run, over every engine and family.
// Unlike nfacctd they survive closing sessions while flows arrive. The number of slots can therefore change
// under traffic of both protocols.

// fastPlan is the plan for fast sinks at one size of the experiment.
type fastPlan struct {
	families []peers.Family // each with both engines
	devices  int            // of one stage
	slots    int            // plus one spare collector
	kills    kills          // restarts of one stage
	beside   bool           // run while nfacctd starts and restarts, not after
}

// engines are weir's engines, named as in its configuration.
var engines = []string{"sk_lookup", "sk_reuseport"}

var familyNames = map[peers.Family]string{peers.IPv4: "v4", peers.IPv6: "v6", peers.DualStack: "dual"}

// fastRate is the messages a second of a device on each protocol. It is high enough to show short losses.
const fastRate = 5

// prepareFast starts the sinks and puts weir over them. weir serve runs from here on.
func (x *experiment) prepareFast(ctx context.Context) error {
	if x.env.Control {
		return nil
	}
	for _, engine := range engines {
		for _, family := range x.plan.fast.families {
			if err := x.newFast(engine, family, len(x.fast)); err != nil {
				return err
			}
		}
	}
	for _, s := range x.fast {
		for _, c := range s.collectors {
			if _, err := s.sockets.Appear(ctx, c, returnLimit); err != nil {
				return err
			}
		}
	}
	x.say("%d services of fast sinks in parallel: both engines, over IPv4, IPv6 or both", len(x.fast))
	if err := x.weir.Apply(ctx); err != nil {
		return err
	}
	_, err := x.weir.Serve()
	return err
}

// newFast creates service number n of fast sinks, and starts its collectors.
func (x *experiment) newFast(engine string, family peers.Family, n int) error {
	s := &stage{env: x.env, result: x.result, world: x.world, weir: x.weir, silent: true, kills: x.plan.fast.kills,
		name: engine[len("sk_"):] + "-" + familyNames[family], port: uint16(rig.Port + 1 + n),
		rand: rand.New(rand.NewPCG(x.env.Seed, uint64(n+1)))}
	for i := range x.plan.fast.slots + 1 {
		c, err := peers.NewFamilySink(x.env, x.world.Collectors.Name, s.name, family, i, int(s.port))
		if err != nil {
			return err
		}
		if err := c.Start(); err != nil {
			return err
		}
		s.collectors = append(s.collectors, c)
	}
	s.watch()
	s.env.OnClose(s.readers())
	listen := map[peers.Family]string{peers.IPv4: "4 0.0.0.0", peers.IPv6: "6 [::]", peers.DualStack: " "}[family]
	s.serves(engine, fmt.Sprintf("udp%s:%d", listen, s.port), fmt.Sprintf("tcp%s:%d", listen, s.port))
	s.service.Spare(1)
	s.routers = routers.Config{Devices: x.plan.fast.devices, IPv6: map[peers.Family]int{peers.IPv6: x.plan.fast.devices, peers.DualStack: x.plan.fast.devices / 2}[family],
		First4: netip.MustParseAddr(fmt.Sprintf("10.99.%d.1", 160+n)), First6: netip.MustParseAddr(fmt.Sprintf("fd00:99::%x:1", n+1)),
		Rate: fastRate, Records: recordsEach, Refresh: 20, Sparse: 2, Retry: 200 * time.Millisecond}
	x.fast = append(x.fast, s)
	return nil
}

// runFast runs the plan for fast sinks on all services at the same time. At its end their routers send
// undisturbed.
func (x *experiment) runFast(ctx context.Context) error {
	if len(x.fast) == 0 {
		return nil
	}
	x.say("fast sinks: %d restarts in each of %d services, then %d → %d slots and back, all at the same time",
		x.plan.fast.kills.restarts, len(x.fast), x.plan.fast.slots, x.plan.fast.slots+1)
	var steps []func(context.Context) error
	for _, s := range x.fast {
		steps = append(steps, s.fast)
	}
	return x.together(ctx, steps...)
}

// fast runs the plan on one service of fast sinks.
func (s *stage) fast(ctx context.Context) error {
	if err := all(ctx, s.admitted, s.begin, s.briefly, s.killAndReturn); err != nil {
		return fmt.Errorf("fast sinks, %s: %w", s.name, err)
	}
	for _, spare := range []int{0, 1} {
		r, err := s.resize(ctx, spare)
		if err != nil {
			return fmt.Errorf("fast sinks, %s: change of the number of slots: %w", s.name, err)
		}
		s.resizes.add(r)
	}
	return nil
}

// begin starts the routers of a service of fast sinks.
func (s *stage) begin(ctx context.Context) error {
	if err := s.newFleet(ctx, s.routers, nil); err != nil {
		return err
	}
	return s.send(ctx)
}

// briefly lets them send undisturbed for a moment.
func (s *stage) briefly(ctx context.Context) error { return s.quietly(ctx, 500*time.Millisecond) }

// finishFast ends the traffic of the fast sinks, and returns the sums over them.
func (x *experiment) finishFast(ctx context.Context) (totals, error) {
	sum := totals{}
	var moves resized
	steered := map[string]bool{}
	restarts, devices := 0, 0
	for _, s := range x.fast {
		if err := s.finish(ctx); err != nil {
			return nil, err
		}
		t := s.ledger.audit(s.spans)
		sum.add(t)
		devices += int(s.ledger.census()["devices"])
		restarts += s.restarted
		if s.restarted > 0 {
			engine, err := s.service.Steered(ctx)
			if err != nil {
				return nil, err
			}
			steered[engine] = true
		}
		moves.add(s.resizes)
		x.sinkReadmits = append(x.sinkReadmits, s.readmits...)
	}
	for m, v := range map[string]float64{"restarts_sinks": float64(restarts), "engines": float64(len(steered)), "devices_sinks": float64(devices),
		"resize_moved_ratio": moves.ratio, "resize_moved_devices": float64(moves.moved), "misdirected_during_resize": float64(moves.misdirected),
		"resize_collateral": float64(moves.collateral), "resize_resets_per_s": float64(moves.resets), "resize_s_max": moves.duration.Seconds()} {
		x.result.Set(m, v)
	}
	return sum, nil
}

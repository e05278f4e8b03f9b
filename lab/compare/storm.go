// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "steer-storm",
		Short: "512 routers reconnect at once: directly, behind HAProxy and with weir",
		Run:   runStorm,
		Next: []string{
			"weir-lab run steer-storm            each way by itself, with a limit of 60 s",
			"weir-lab run steer-compare --quick  the cost of each way",
		},
	})
}

// proxied is the existing way of the storm: HAProxy alone, because there is no IPFIX.
const proxied = "haproxy"

// stormPlan holds the parameters of one size of the storm.
type stormPlan struct {
	devices  int
	together bool          // all ways at the same moment, to share the machine equally
	limit    time.Duration // routers not up by then count as up at the limit
}

var stormPlans = map[lab.Size]stormPlan{
	lab.Full:  {512, false, 60 * time.Second},
	lab.Quick: {512, true, 40 * time.Second},
	lab.Smoke: {48, true, 10 * time.Second},
}

// patience is the longest time of weir's routers on a busy machine. All must come up: this is correctness.
// The time is performance.
const patience = 170 * time.Second

// censor replaces longer and missing times of weir. The other ways use the limit of the run. A shorter
// limit can therefore only favour the others.
const censor = 60 * time.Second

// marks are the measured shares of the routers.
var marks = []int{50, 95, 100} // percent

// runStorm connects all routers at once to collectors just back, as after an outage. The backlog is
// nfacctd's own, 1, except where weir raises it. This is today's behaviour. No router sends IPFIX, because
// nfacctd 1.7.7 crashes at flow records from a router while it closes this router's session.
func runStorm(ctx context.Context, e *lab.Env, r *lab.Result) error {
	if e.Control {
		return errors.New("steer-storm has no control run: it already compares with runs without weir")
	}
	plan := stormPlans[e.Size]
	x := &experiment{plan: plans[e.Size], env: e, result: r}
	for a := devices4.Addr().Next(); len(x.devices) < plan.devices; a = a.Next() {
		x.devices = append(x.devices, a)
	}
	if _, err := lab.Find("nfacctd"); err != nil {
		return fmt.Errorf("%w (Debian package pmacct)", err)
	}
	names := []string{direct, proxied, weir}
	if _, err := lab.Find("haproxy"); err != nil {
		r.Skip("haproxy is not installed: weir is compared with direct connections only")
		names = []string{direct, weir}
	}
	defer x.readers()()
	if err := x.buildStorm(ctx, names); err != nil {
		return err
	}
	if err := x.blow(ctx, plan); err != nil {
		return err
	}
	x.stormClaims(plan)
	return x.weir.Remove(ctx)
}

// buildStorm starts the collectors, HAProxy and weir.
func (x *experiment) buildStorm(ctx context.Context, names []string) error {
	var err error
	if x.world, err = newWorld(x.env); err != nil {
		return err
	}
	x.dialer = routers.NewDialer(x.world.routers)
	x.say("starting %d nfacctd, %d for each way on its own host: %s", collectorsEach*len(names), collectorsEach, strings.Join(names, ", "))
	for i, name := range names {
		y, err := newWay(ctx, x.world, name, i*collectorsEach, len(x.devices)*5/8+16)
		if err != nil {
			return err
		}
		x.ways = append(x.ways, y)
		ways := append([]*way(nil), x.ways...)
		x.polled.Store(&ways)
	}
	if err := x.steerStorm(ctx); err != nil {
		return err
	}
	if y := x.way(proxied); y != nil {
		proxy := peers.Proxy{Listen: y.service(), Backlog: backlog, Backends: y.behind(), Collector: x.collectors, Header: true}
		p, err := proxy.Start(x.env, y.ns)
		if err != nil {
			return err
		}
		y.between = []*lab.Process{p}
		if err := y.relayed(ctx, y.between); err != nil {
			return err
		}
	}
	for _, y := range x.ways {
		for i, c := range y.collectors {
			if _, err := y.sockets[i].Appear(ctx, c, returnLimit); err != nil {
				return err
			}
		}
	}
	return x.service.Admitted(ctx, 60*time.Second)
}

func (x *experiment) steerStorm(ctx context.Context) error {
	y := x.way(weir)
	x.service = &rig.Service{Name: "telemetry", Collectors: y.collectors}
	config := fmt.Sprintf("services:\n  telemetry:\n    listen: [udp 0.0.0.0:%d, tcp 0.0.0.0:%d]\n    netns: %s\n    steer: {slots: %d, seed: %d}\n    members:\n",
		port, port, y.ns, collectorsEach, uint32(x.env.Seed))
	for i, c := range y.collectors {
		config += fmt.Sprintf("      - {slot: %d, pidfile: %s}\n", i, c.PIDFile)
	}
	var err error
	if x.weir, err = rig.NewWeirFrom(x.env, config, x.service); err != nil {
		return err
	}
	if err := x.weir.Apply(ctx, "--allow-outage"); err != nil { // the collectors are still opening their sockets
		return err
	}
	if _, err := x.weir.Serve(); err != nil {
		return err
	}
	x.collectors, err = x.service.Where(ctx, x.devices)
	return err
}

// blow starts the storm on every way.
func (x *experiment) blow(ctx context.Context, plan stormPlan) error {
	for _, y := range x.ways {
		for i, d := range x.devices {
			y.lanes = append(y.lanes, &lane{dev: routers.NewDevice(i, d), collector: x.collectors[d], dial: x.dialer, to: y.target(x.collectors[d])})
		}
	}
	if !plan.together {
		for _, y := range x.ways {
			x.say("%s: %d routers connect at once", y.name, len(x.devices))
			if err := x.storm(ctx, y, plan.limit); err != nil {
				return err
			}
		}
		return nil
	}
	x.say("%d routers connect at once, by each of %d ways at the same moment", len(x.devices), len(x.ways))
	failed := make([]error, len(x.ways))
	var all sync.WaitGroup
	for i, y := range x.ways {
		all.Go(func() { failed[i] = x.storm(ctx, y, plan.limit) })
	}
	all.Wait()
	return errors.Join(failed...)
}

// storm connects the routers of one way, and records the times until shares of them are up. A router is up
// when its collector has logged a Peer Up. The router's own view does not count, because a full backlog
// completes the handshake for the router alone.
func (x *experiment) storm(ctx context.Context, y *way, limit time.Duration) error {
	idle, err := y.cpu()
	if err != nil {
		return err
	}
	holding, release := context.WithCancel(ctx)
	var holders sync.WaitGroup
	defer func() { release(); holders.Wait() }()
	begin := time.Now()
	for _, l := range y.lanes {
		holders.Go(func() { l.keepUp(holding) })
	}
	times := map[int]time.Duration{}
	up, total := 0, len(y.lanes)
	for up < total {
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
		up = y.tally.up()
		took := time.Since(begin)
		for _, share := range marks {
			if _, done := times[share]; !done && up*100 >= share*total {
				times[share] = took
			}
		}
		if took > limit && (y.name != weir || took > patience) {
			break
		}
	}
	used, err := y.cpu()
	if err != nil {
		return err
	}
	x.result.Set("cpu_s_"+y.name, (used - idle).Seconds())
	x.result.Set("up_"+y.name, float64(up))
	for _, share := range marks {
		took, reached := times[share]
		most := limit
		if y.name == weir {
			most = censor
		}
		if !reached || took > most {
			took = most
		}
		x.result.Set(fmt.Sprintf("seconds_%d_%s", share, y.name), took.Seconds())
	}
	x.say("%s: %d of %d routers are up at their collectors after %.1f s", y.name, up, total, time.Since(begin).Seconds())
	return nil
}

// stormClaims evaluates weir's promises.
func (x *experiment) stormClaims(plan stormPlan) {
	r := x.result
	r.Set("devices", float64(len(x.devices)))
	r.Set("limit_s", plan.limit.Seconds())
	r.Claim(lab.Correctness, "with weir every router is up at its collector", "up_weir", fmt.Sprintf("== %d", len(x.devices)))
	best := 0.0
	for _, y := range x.ways {
		if t := r.Metrics["seconds_95_"+y.name]; y.name != weir && (best == 0 || t < best) {
			best = t
		}
	}
	if best > 0 {
		r.Set("seconds_95_ratio", r.Metrics["seconds_95_weir"]/best)
	}
	if x.env.Size != lab.Smoke {
		r.Claim(lab.Performance, "time until 95 % are up, relative to the best of the others", "seconds_95_ratio", "<= 0.7")
	}
}

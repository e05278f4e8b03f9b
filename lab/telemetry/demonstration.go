// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

// Demonstration is a short form of the experiment for spectators. Beside it as many routers send to as many
// collectors without weir. Its methods are called in the order of their declaration.
type Demonstration struct {
	*experiment
	plain *stage // without weir
	stop  []func()

	mu      sync.Mutex
	plainUp int // routers without weir with a session
}

// Recovery is the result of a reconnect storm.
type Recovery struct {
	Routers int
	Up      int
	Took    time.Duration // until the last router was up, or the limit
}

// plainPort is the port of the collectors without weir.
const plainPort = rig.Port + 1

// stormWait is the longest wait for routers without weir, by size.
var stormWait = map[lab.Size]time.Duration{lab.Full: 20 * time.Second, lab.Smoke: 4 * time.Second}

var demonstrations = map[lab.Size]plan{
	lab.Full:  {devices: 254, ipv6: 32, real: 2, collectors: 4, kills: nfacctdKills(1, 1), rate: 2, quiet: 2 * time.Second, plain: 256, upgrades: 3},
	lab.Smoke: {devices: 48, ipv6: 8, collectors: 2, kills: nfacctdKills(1, 1), rate: 4, quiet: time.Second, plain: 48, upgrades: 1},
}

// NewDemonstration prepares a demonstration. Close ends it.
func NewDemonstration(e *lab.Env, r *lab.Result) *Demonstration {
	d := &Demonstration{experiment: &experiment{plan: demonstrations[e.Size], view: &view{},
		stage: &stage{env: e, result: r, name: "telemetry", port: rig.Port, rand: e.Rand}}}
	d.kills = d.plan.kills
	d.view.frame = d.frame
	// Notes about routers without weir belong to no result.
	d.plain = &stage{env: e, result: lab.NewResult("", e.Size, 0), name: "plain", port: plainPort, silent: true, rand: e.Rand}
	d.stop = append(d.stop, d.readers(), d.plain.readers())
	return d
}

// Close stops reading the collectors' output.
func (d *Demonstration) Close() {
	for _, stop := range d.stop {
		stop()
	}
}

// Counts returns the number of simulated and real routers and of collectors, with weir alone.
func (d *Demonstration) Counts() (simulated, real, collectors int) {
	return d.plan.devices, len(d.real), d.plan.collectors
}

// Config returns the path of the configuration.
func (d *Demonstration) Config() string { return d.weir.Config() }

// Where returns the source address of a router.
func (d *Demonstration) Where() netip.Addr { return d.ledger.addrs()[6] }

// Begin creates the network and starts all collectors.
func (d *Demonstration) Begin(ctx context.Context) error {
	if err := d.build(ctx); err != nil {
		return err
	}
	d.plain.world = d.world
	d.plain.watch()
	most := d.plan.plain*3/d.plan.collectors + 16
	for n := range d.plan.collectors {
		c, err := peers.NewCollector(d.env, d.world.Collectors.Name, 10+n, plainPort, most)
		if d.sinks {
			c, err = peers.NewSink(d.env, d.world.Collectors.Name, 10+n, plainPort)
		}
		if err == nil {
			err = c.Start()
		}
		if err == nil {
			err = pause(ctx, 200*time.Millisecond) // see deaf
		}
		if err != nil {
			return err
		}
		d.plain.collectors = append(d.plain.collectors, c)
	}
	d.env.Child = true // without the run to interrupt
	if err := d.startCollectors(ctx); err != nil {
		return err
	}
	for _, c := range d.plain.collectors {
		if err := d.plain.appears(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// appears waits until a started collector accepts records.
func (s *stage) appears(ctx context.Context, c *peers.Collector) error {
	if _, err := s.sockets.Appear(ctx, c, returnLimit); err != nil {
		return err
	}
	return ready(ctx, c)
}

// Steer applies weir to the running collectors, and starts weir serve.
func (d *Demonstration) Steer(ctx context.Context) error {
	if err := d.steer(ctx); err != nil {
		return err
	}
	_, err := d.weir.Serve()
	return err
}

// Storm makes all routers connect at one moment, with and without weir. A router is up when its collector
// has logged its Peer Up.
func (d *Demonstration) Storm(ctx context.Context) (with, without Recovery, err error) {
	if err := all(ctx, d.prepareTraffic, d.preparePlain); err != nil {
		return with, without, err
	}
	watched, cancel := context.WithCancel(ctx)
	defer cancel()
	plain := make(chan Recovery, 1)
	d.plain.fleet.Silence(true) // until the sessions are up: see revive
	d.plain.fleet.Start(ctx)
	d.env.OnClose(d.plain.fleet.Stop)
	go func() { plain <- d.watchPlain(watched) }()
	begin := time.Now()
	if err := d.connect(ctx); err != nil {
		return with, without, err
	}
	with = Recovery{len(d.fleet.Devices), len(d.fleet.Devices), time.Since(begin)}
	d.say("with weir all %d routers are up at their collectors after %.1f s", with.Up, with.Took.Seconds())
	select {
	case without = <-plain:
	case <-ctx.Done():
		err = ctx.Err()
	}
	return with, without, err
}

// preparePlain creates the routers without weir.
func (d *Demonstration) preparePlain(context.Context) error {
	s := d.plain
	fleet, err := routers.New(routers.Config{
		Devices: d.plan.plain, First4: plain4, First6: rig.Devices6.Addr(), To4: netip.AddrPortFrom(rig.Service4, plainPort),
		Rate: 2, Records: recordsEach, Refresh: 1, Retry: 500 * time.Millisecond, NS: d.world.Routers.Handle,
	})
	if err != nil {
		return err
	}
	ledger := newLedger(s.result, fleet, nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fleet, s.ledger = fleet, ledger
	return nil
}

// watchPlain counts routers without weir until all are up, or the limit.
func (d *Demonstration) watchPlain(ctx context.Context) Recovery {
	begin, total := time.Now(), d.plan.plain
	for {
		up := d.plain.ledger.sessions()
		d.mu.Lock()
		d.plainUp = up
		d.mu.Unlock()
		if took := time.Since(begin); up == total || took > stormWait[d.env.Size] || pause(ctx, 20*time.Millisecond) != nil {
			return Recovery{total, up, took}
		}
	}
}

// frame adds the way of the packets above the picture, and the routers without weir below it.
func (d *Demonstration) frame(lines []string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	lines = append([]string{fmt.Sprintf("routers ──▶ %s, port %d ──▶ slots ──▶ collectors", rig.Service4, d.port)}, lines...)
	return append(lines, fmt.Sprintf("without weir: %d of %d routers connected to %d collectors", d.plainUp, d.plan.plain, d.plan.collectors))
}

// Split lets the routers without weir send IPFIX too, and ends them. It returns the number of routers with
// both streams counted, and the number of routers with their streams at more than one collector.
func (d *Demonstration) Split(ctx context.Context) (arrived, split int, err error) {
	s := d.plain
	s.fleet.Silence(false)
	if err := pause(ctx, 3*time.Second); err != nil { // nfacctd writes once a second
		return 0, 0, err
	}
	arrived, split = s.ledger.arrived(), s.ledger.split()
	s.fleet.Stop()
	for _, c := range s.collectors {
		if err := c.Kill(syscall.SIGKILL); err != nil { // it would handle the ends of its sessions for long
			return 0, 0, err
		}
	}
	return arrived, split, nil
}

// Traffic adds IPFIX, and checks the arrival of every record.
func (d *Demonstration) Traffic(ctx context.Context) error { return all(ctx, d.flow, d.calm) }

// Kill kills a collector and waits for its return.
func (d *Demonstration) Kill(ctx context.Context) error { return d.killAndReturn(ctx) }

// Upgrade replaces weir's programs under traffic.
func (d *Demonstration) Upgrade(ctx context.Context) error { return d.upgrade(ctx) }

// End ends the traffic, compares all records, and removes weir. The metrics are as in the experiment.
func (d *Demonstration) End(ctx context.Context) error {
	return d.end(ctx)
}

// SPDX-License-Identifier: Apache-2.0

// Package telemetry is the experiment of the product's main job: routers that send IPFIX and BMP to
// unmodified collectors behind one address, collectors that are killed and come back, and every record
// accounted for.
package telemetry

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "telemetry",
		Short: "routers' IPFIX and BMP steered to unmodified nfacctd collectors that are killed and return",
		Run:   run,
		Next: []string{
			"weir-lab run telemetry --without-weir   the same without weir: it fails",
			"weir-lab run telemetry --quick --json   the findings for a program",
			"weir doctor                             what this kernel can run",
			"weir apply -f weir.yaml                 your own collectors: README.md",
		},
	})
}

// plan is what one size of the experiment does.
type plan struct {
	devices, ipv6 int // simulated, and how many of them over IPv6
	real          int // real routers, beside them
	collectors    int
	restarts      int
	together      int     // collectors that are down at the same time, at most
	rate          float64 // messages a second, a device and a protocol
	wantDevices   string
	quiet         time.Duration // of undisturbed traffic first
	plain         int           // devices that first send without weir, for comparison
}

var plans = map[lab.Size]plan{
	lab.Full:  {510, 64, 2, 4, 50, 3, 2, "== 512", 5 * time.Second, 64},
	lab.Quick: {158, 24, 2, 4, 4, 3, 3, ">= 128", 2 * time.Second, 64},
	lab.Smoke: {39, 8, 1, 3, 2, 2, 4, ">= 40", time.Second, 0},
}

// experiment is one run.
type experiment struct {
	plan
	env        *lab.Env
	result     *lab.Result
	world      *rig.World
	collectors []*peers.Collector
	real       []*peers.Router
	sinks      bool // built-in collectors stand in for nfacctd
	fleet      *routers.Fleet
	ledger     *ledger
	plain      *ledger   // of the devices that sent before weir was there
	weir       *rig.Weir // nil in the control run
	service    *rig.Service
	sockets    *rig.SocketWatch
	spans      []span
	readmits   []time.Duration
	restarted  int
	lostBase   []uint64 // what weir kept from each slot, when it was last asked
	child      *interruption
	view       *view
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	x := &experiment{plan: plans[e.Size], env: e, result: r, view: &view{}}
	defer x.readers()() // what collectors write is read to the end also when a step fails
	stalls := lab.WatchStalls()
	steps := []func(context.Context) error{x.build, x.startCollectors, x.baseline, x.steer, x.startTraffic, x.quietly, x.killAndReturn, x.storm, x.finish}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			stalls.Stop()
			return err
		}
	}
	p50, p99, longest := stalls.Stop()
	r.Set("stall_ms_p50", ms(p50))
	r.Set("stall_ms_p99", ms(p99))
	r.Set("stall_ms_max", ms(longest))
	x.claims()
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (x *experiment) say(format string, a ...any) { x.env.Watch.Say(format, a...) }

// build makes the network and says what real software is missing.
func (x *experiment) build(ctx context.Context) error {
	if _, err := lab.Find("nfacctd"); err != nil {
		x.sinks = true
		x.result.Skip("nfacctd (Debian package pmacct) is not installed: collectors are the lab's own, and prove less")
		x.say("nfacctd is not installed (apt-get install pmacct): built-in collectors take its place")
	}
	exporters := []string{"pmacctd", "softflowd"}
	for i := range x.plan.real {
		router := &peers.Router{Name: fmt.Sprintf("router%d", i+1), Exporter: exporters[i%len(exporters)], Interface: "down", Routes: 200}
		if missing := router.Missing(); len(missing) > 0 {
			x.result.Skip("%v not installed: a simulated router takes the place of a real one", missing)
			x.devices++
			continue
		}
		x.real = append(x.real, router)
	}
	x.say("building the network: a host with %d collectors, %d routers of which %d are real (FRR) and %d speak IPv6",
		x.plan.collectors, x.devices+len(x.real), len(x.real), x.ipv6)
	var err error
	if x.world, err = rig.NewWorld(x.env, len(x.real)); err != nil {
		return err
	}
	for i, router := range x.real {
		site := x.world.Real[i]
		router.Namespace, router.Neighbour = site.Router.Name, site.Peer.Name
		router.Addr, router.Local, router.Far = site.Addr, site.RouterBGP, site.Neighbour
		router.Collector = netip.AddrPortFrom(rig.Service4, rig.Port)
		if err := router.StartBGP(x.env); err != nil {
			return err
		}
	}
	return x.world.Reachable(ctx, 10*time.Second)
}

// startCollectors starts every nfacctd on the same address and port.
func (x *experiment) startCollectors(ctx context.Context) error {
	// Hashing spreads devices unevenly, half as many again as the average is beyond any draw seen; and in a
	// storm each may connect before nfacctd has noticed the end of its old session.
	peersEach := (x.devices+len(x.real))*3/x.plan.collectors + 16
	if !x.sinks {
		x.say("starting %d nfacctd, unmodified, all on port %d for UDP and TCP; nfacctd itself sleeps 5 s before it opens its sockets",
			x.plan.collectors, rig.Port)
	}
	for n := range x.plan.collectors {
		c, err := peers.NewCollector(x.env, x.world.Collectors.Name, n, rig.Port, peersEach)
		if x.sinks {
			c, err = peers.NewSink(x.env, x.world.Collectors.Name, n, rig.Port)
		}
		if err != nil {
			return err
		}
		if err := c.Start(); err != nil {
			return err
		}
		if err := pause(ctx, 200*time.Millisecond); err != nil { // see deaf
			return err
		}
		x.collectors = append(x.collectors, c)
	}
	x.child = x.startInterruption(ctx)
	x.sockets = rig.WatchSockets(x.world.Collectors.Handle, rig.Port)
	x.env.OnClose(x.sockets.Stop)
	for _, c := range x.collectors {
		if _, err := x.sockets.Appear(ctx, c, 60*time.Second); err != nil {
			return err
		}
	}
	return nil
}

// steer lets weir take over the running collectors.
func (x *experiment) steer(ctx context.Context) error {
	if x.env.Control {
		x.say("control run: no weir; the kernel spreads packets over the sockets by its own hash (SO_REUSEPORT)")
		return nil
	}
	var err error
	x.service = &rig.Service{Name: "telemetry", Collectors: x.collectors,
		Listen: []string{fmt.Sprintf("udp :%d", rig.Port), fmt.Sprintf("tcp :%d", rig.Port)}}
	if x.weir, err = rig.NewWeir(x.env, x.world.Collectors.Name, x.service); err != nil {
		return err
	}
	x.say("weir apply -f weir.yaml: %d slots, each with the process of a pidfile; weir serve notices who starts", len(x.collectors))
	if err := x.weir.Apply(ctx); err != nil {
		return err
	}
	if _, err := x.weir.Serve(); err != nil {
		return err
	}
	if err := x.service.Admitted(ctx, 10*time.Second); err != nil {
		return err
	}
	x.lostBase, err = x.lost(ctx)
	return err
}

// startTraffic asks weir for the truth about every device and lets them send.
func (x *experiment) startTraffic(ctx context.Context) error {
	cfg := routers.Config{
		Devices: x.devices, IPv6: x.ipv6, First4: rig.Devices4.Addr().Next(), First6: rig.Devices6.Addr().Next(),
		To4: netip.AddrPortFrom(rig.Service4, rig.Port), To6: netip.AddrPortFrom(rig.Service6, rig.Port),
		Rate: x.rate, Records: 3, Refresh: 20, Retry: 500 * time.Millisecond, NS: x.world.Routers.Handle,
		Notice: func(e routers.Event) { x.ledger.notice(e) },
	}
	if x.env.Control {
		cfg.Ramp = 20 * time.Millisecond // without weir the backlog is nfacctd's own: 1
	}
	var err error
	if x.fleet, err = routers.New(cfg); err != nil {
		return err
	}
	var realAddrs []netip.Addr
	for _, r := range x.real {
		realAddrs = append(realAddrs, r.Addr)
	}
	ledger := newLedger(x.result, x.fleet, realAddrs)
	x.view.lock()
	x.ledger = ledger // from here on, what collectors write is read
	x.view.unlock()
	if err := x.askWhere(ctx); err != nil {
		return err
	}
	x.view.begin(x)
	for i, r := range x.real {
		if err := x.world.Real[i].Connect(); err != nil {
			return err
		}
		if err := r.StartExporter(x.env); err != nil {
			return err
		}
		x.chatter(ctx, x.world.Real[i])
	}
	x.say("%d routers connect at once and send: IPFIX over UDP, BMP over TCP, each from its own address", x.devices+len(x.real))
	x.fleet.Start(ctx)
	x.env.OnClose(x.fleet.Stop)
	if err := x.allUp(ctx, nil, 60*time.Second); err != nil {
		return err
	}
	x.endEpoch(nil) // no slot counts as calm in the epoch in which collectors come up
	for _, c := range x.collectors {
		x.ledger.calm(c.Number)
	}
	return nil
}

// askWhere enters weir's answer as the truth about every device's slot.
func (x *experiment) askWhere(ctx context.Context) error {
	if x.weir == nil {
		return nil
	}
	slots, err := x.service.Where(ctx, x.ledger.addrs())
	if err != nil {
		return err
	}
	x.ledger.mu.Lock()
	defer x.ledger.mu.Unlock()
	for _, a := range x.ledger.accounts {
		slot := slots[a.addr]
		if a.slot != unknown && a.slot != slot {
			return fmt.Errorf("weir steer where put %s into slot %d before and into %d now", a.addr, a.slot, slot)
		}
		a.slot = slot
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

// Package telemetry is the experiment about weir's main task. Routers send IPFIX and BMP to unmodified
// collectors behind one address. Collectors are killed and come back, and every record is accounted for.
package telemetry

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "telemetry",
		Short: "routers' IPFIX and BMP steered to unmodified nfacctd collectors, through kills and restarts",
		Run:   run,
		Next: []string{
			"weir-lab run telemetry --without-weir   the same without weir: it fails",
			"weir-lab run telemetry --quick --json   the findings for a program",
			"weir doctor                             what this kernel can run",
			"weir apply -f weir.yaml                 your own collectors: README.md",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	devices, ipv6 int // simulated routers, and the number of them over IPv6
	real          int // real routers, beside them
	collectors    int
	kills         kills   // of nfacctd
	rate          float64 // messages a second, a device and a protocol
	wantDevices   string
	quiet         time.Duration // duration of the first undisturbed traffic
	plain         int           // devices to send first without weir, for comparison
	upgrades      int
	fast          fastPlan
}

var plans = map[lab.Size]plan{
	lab.Full: {510, 64, 2, 4, nfacctdKills(40, 3), 2, "== 512", 5 * time.Second, 64, 10,
		fastPlan{[]peers.Family{peers.IPv4, peers.IPv6, peers.DualStack}, 48, 4, sinkKills(27, 3), false}},
	lab.Quick: {158, 24, 2, 4, nfacctdKills(4, 3), 3, ">= 128", 2 * time.Second, 64, 3,
		fastPlan{[]peers.Family{peers.DualStack}, 32, 4, sinkKills(6, 3), true}},
	lab.Smoke: {39, 8, 1, 3, nfacctdKills(2, 2), 4, ">= 40", time.Second, 0, 2,
		fastPlan{[]peers.Family{peers.DualStack}, 24, 3, sinkKills(2, 2), true}},
}

func nfacctdKills(restarts, together int) kills {
	return kills{restarts, together, 800 * time.Millisecond, 700 * time.Millisecond}
}

func sinkKills(restarts, together int) kills {
	return kills{restarts, together, 200 * time.Millisecond, 150 * time.Millisecond}
}

// recordsEach is the number of data records of an IPFIX message.
const recordsEach = 3

// experiment is one run.
type experiment struct {
	*stage       // the service of nfacctd
	plan         plan
	real         []*peers.Router
	sinks        bool     // built-in collectors replace nfacctd
	fast         []*stage // the services of fast sinks
	sinkReadmits []time.Duration
	child        *interruption
	view         *view
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	x := &experiment{plan: plans[e.Size], view: &view{},
		stage: &stage{env: e, result: r, name: "telemetry", port: rig.Port, rand: e.Rand}}
	x.kills = x.plan.kills
	defer x.readers()() // reads the collectors' output to its end, even if a step fails
	if err := r.WithStalls(func() error { return all(ctx, x.build, x.prepareFast, x.everyone, x.upgrade, x.end) }); err != nil {
		return err
	}
	x.claims()
	return nil
}
func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// all runs steps one after another.
func all(ctx context.Context, steps ...func(context.Context) error) error {
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// everyone runs the plans of nfacctd and of the fast sinks.
func (x *experiment) everyone(ctx context.Context) error {
	nfacctd := func(ctx context.Context) error {
		return all(ctx, x.startCollectors, x.baseline, x.steer, x.startTraffic, x.calm, x.killAndReturn, x.storm)
	}
	if !x.plan.fast.beside {
		return all(ctx, nfacctd, x.runFast)
	}
	return x.together(ctx, nfacctd, x.runFast)
}

// together runs steps at the same time. If one fails, the others end. Processes started by them continue
// after all have succeeded.
func (x *experiment) together(ctx context.Context, steps ...func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	x.env.OnClose(cancel)
	var group errgroup.Group
	for _, step := range steps {
		group.Go(func() error {
			err := step(ctx)
			if err != nil {
				cancel()
			}
			return err
		})
	}
	return group.Wait()
}

// build creates the network and reports missing real software.
func (x *experiment) build(ctx context.Context) error {
	if _, err := lab.Find("nfacctd"); err != nil {
		x.sinks = true
		x.result.Skip("nfacctd (Debian package pmacct) is not installed: the lab's own collectors replace it, and prove less")
		x.say("nfacctd is not installed (apt-get install pmacct): built-in collectors replace it")
	}
	exporters := []string{"pmacctd", "softflowd"}
	for i := range x.plan.real {
		router := &peers.Router{Name: fmt.Sprintf("router%d", i+1), Exporter: exporters[i%len(exporters)], Interface: "down", Routes: 200}
		if missing := router.Missing(); len(missing) > 0 {
			x.result.Skip("%v not installed: a simulated router replaces a real one", missing)
			x.plan.devices++
			continue
		}
		x.real = append(x.real, router)
	}
	x.say("building the network: a host with %d collectors; %d routers, %d of them real (FRR), %d over IPv6",
		x.plan.collectors, x.plan.devices+len(x.real), len(x.real), x.plan.ipv6)
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
	if !x.env.Control {
		if x.weir, err = rig.NewWeir(x.env, x.world.Collectors.Name); err != nil {
			return err
		}
	}
	return x.world.Reachable(ctx, 60*time.Second)
}

// startCollectors starts every nfacctd on the same address and port.
func (x *experiment) startCollectors(ctx context.Context) error {
	// Hashing distributes devices unevenly: 1.5 times the average is beyond any draw seen. In a storm each
	// may also connect before nfacctd has noticed the end of its old session.
	peersEach := (x.plan.devices+len(x.real))*3/x.plan.collectors + 16
	if !x.sinks {
		x.say("starting %d unmodified nfacctd, all on port %d for UDP and TCP; nfacctd sleeps 5 s before it opens its sockets",
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
	x.watch()
	for _, c := range x.collectors {
		if err := x.appear(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// appear waits until a started collector has its sockets and accepts records.
func (x *experiment) appear(ctx context.Context, c *peers.Collector) error {
	if _, err := x.sockets.Appear(ctx, c, returnLimit); err != nil {
		return err
	}
	return ready(ctx, c)
}

// ready waits until a collector with open sockets also accepts records.
func ready(ctx context.Context, c *peers.Collector) error {
	for deadline := time.Now().Add(returnLimit); !c.Ready(); {
		if !c.Running() || time.Now().After(deadline) {
			return fmt.Errorf("%s did not become ready: %w; see its log in %s", c, c.Err(), c.Dir())
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// steer starts weir over the running collectors.
func (x *experiment) steer(ctx context.Context) error {
	if x.env.Control {
		x.say("control run: no weir; the kernel distributes packets over the sockets by its own hash (SO_REUSEPORT)")
		return nil
	}
	x.serves("", fmt.Sprintf("udp :%d", x.port), fmt.Sprintf("tcp :%d", x.port))
	x.say("weir apply -f weir.yaml: %d slots, each with the process of a pidfile; weir serve detects started members", len(x.collectors))
	if err := x.weir.Apply(ctx); err != nil {
		return err
	}
	return x.admitted(ctx)
}

// startTraffic starts the routers.
func (x *experiment) startTraffic(ctx context.Context) error {
	return all(ctx, x.prepareTraffic, x.send)
}

// prepareTraffic creates the routers and starts the real ones.
func (x *experiment) prepareTraffic(ctx context.Context) error {
	cfg := routers.Config{
		Devices: x.plan.devices, IPv6: x.plan.ipv6, First4: rig.Devices4.Addr().Next(), First6: rig.Devices6.Addr().Next(),
		Rate: x.plan.rate, Records: recordsEach, Refresh: 20, Retry: 500 * time.Millisecond,
	}
	if x.env.Control {
		cfg.Ramp = 20 * time.Millisecond // without weir the backlog is nfacctd's own: 1
	} else {
		cfg.Opened = x.opened
		cfg.Sparse = 4 // only weir serve provides their template
	}
	var realAddrs []netip.Addr
	for _, r := range x.real {
		realAddrs = append(realAddrs, r.Addr)
	}
	if err := x.newFleet(ctx, cfg, realAddrs); err != nil {
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
	x.say("%d routers connect at once and send: IPFIX over UDP, BMP over TCP, each from its own address", x.plan.devices+len(x.real))
	return nil
}

// opened reports whether a collector has logged the Peer Up of a device's session. nfacctd crashes at a
// flow record of a session while it opens it, so its routers hold their records until then.
func (x *experiment) opened(device, session int) bool {
	x.ledger.mu.Lock()
	defer x.ledger.mu.Unlock()
	return x.ledger.accounts[device].session >= session
}

// calm lets the routers send undisturbed.
func (x *experiment) calm(ctx context.Context) error { return x.quietly(ctx, x.plan.quiet) }

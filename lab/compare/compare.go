// SPDX-License-Identifier: Apache-2.0

// Package compare compares weir with today's solutions. These are HAProxy in front of BMP, nfacctd as a tee
// in front of IPFIX, plain SO_REUSEPORT, and routers configured with one collector each. All ways carry the
// same messages in the same run, to unmodified collectors and to fast sinks.
package compare

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "steer-compare",
		Short: "cost of weir compared with HAProxy, nfacctd as a tee, plain SO_REUSEPORT and direct connections",
		Run:   run,
		Next: []string{
			"weir-lab run steer-compare --quick --json   the findings for a program",
			"weir-lab run steer-storm                    512 routers reconnect at once",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	devices int
	rounds  int // with real collectors
	sweeps  int // messages of each protocol a router sends per round
	fast    map[work]effort
}

// effort limits a comparison with fast sinks.
type effort struct {
	messages int // in a round, by each way
	rounds   int
	limit    time.Duration // no round begins after it, once the minimum is reached
}

// fewest is the minimum number of rounds, despite limits. A median of fewer means nothing.
const fewest = 9

var plans = map[lab.Size]plan{
	lab.Full: {512, 24, 15, map[work]effort{
		datagrams: {1920, 400, 2 * time.Minute}, messages: {3840, 200, time.Minute}, connections: {192, 100, time.Minute}}},
	lab.Quick: {512, 6, 7, map[work]effort{
		datagrams: {1920, 90, 14 * time.Second}, messages: {3840, 20, 6 * time.Second}, connections: {192, 20, 2 * time.Second}}},
	lab.Smoke: {48, 1, 5, map[work]effort{datagrams: {480, 1, 0}, messages: {480, 1, 0}, connections: {96, 1, 0}}},
}

// experiment is one run.
type experiment struct {
	plan
	env        *lab.Env
	result     *lab.Result
	world      *world
	dialer     *routers.Dialer
	devices    []netip.Addr
	collectors map[netip.Addr]int // collector of each router, by every way: weir's choice

	fast    []*fastSite
	ways    []*way
	relays  []relay
	weir    *rig.Weir
	serve   *lab.Process // weir serve
	service *rig.Service

	polled  atomic.Pointer[[]*way] // ways with output to read
	holders sync.WaitGroup
	holding context.Context

	epoch      uint32
	total      map[string][]float64 // µs a message, by way and round
	miscounted map[string]int
	costs      map[work]map[string][]float64 // µs, by path: for each of its hosts in each round
}

// relay is a site with its intermediaries.
type relay struct {
	*site
	between []*lab.Process
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	if e.Control {
		return errors.New("steer-compare has no control run: it already compares with runs without weir")
	}
	x := &experiment{plan: plans[e.Size], env: e, result: r, total: map[string][]float64{}, costs: map[work]map[string][]float64{}, miscounted: map[string]int{}}
	for a := devices4.Addr().Next(); len(x.devices) < x.plan.devices; a = a.Next() {
		x.devices = append(x.devices, a)
	}
	defer x.readers()()
	var release context.CancelFunc
	x.holding, release = context.WithCancel(ctx)
	defer func() { release(); x.holders.Wait() }()
	err := r.WithStalls(func() error {
		for _, step := range []func(context.Context) error{x.build, x.steer, x.relay, x.paths, x.collectorsAlone, x.collectorsReady, x.open, x.measure, x.memory, x.restarts, x.finish} {
			if err := step(ctx); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	x.claims()
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (x *experiment) say(format string, a ...any) { x.env.Watch.Log(format, a...) }

// build creates the hosts, and starts the slow part: the collectors.
func (x *experiment) build(ctx context.Context) error {
	var err error
	if x.world, err = newWorld(x.env); err != nil {
		return err
	}
	x.dialer = routers.NewDialer(x.world.routers)
	names := []string{direct, existing, weir}
	if _, err := lab.Find("haproxy"); err != nil {
		x.result.Skip("haproxy is not installed: no comparison with the existing way")
		names = []string{direct, weir}
	}
	if _, err := lab.Find("nfacctd"); err != nil {
		x.result.Skip("nfacctd (Debian package pmacct) is not installed: no real collectors and no tee, only a comparison with plain SO_REUSEPORT")
		names = nil
	}
	if len(names) > 0 {
		x.say("starting %d nfacctd, %d for each way on its own host: %s", collectorsEach*len(names), collectorsEach, strings.Join(names, ", "))
	}
	for i, name := range names {
		y, err := newWay(ctx, x.world, name, i*collectorsEach, len(x.devices)*5/8+16)
		if err != nil {
			return err
		}
		x.ways = append(x.ways, y)
		ways := slices.Clone(x.ways)
		x.polled.Store(&ways)
	}
	return x.buildFast(ctx, slices.Contains(names, existing))
}

// reading lists the ways with collector output to read.
func (x *experiment) reading() []*way {
	if ways := x.polled.Load(); ways != nil {
		return *ways
	}
	return nil
}

func (x *experiment) way(name string) *way {
	for _, y := range x.ways {
		if y.name == name {
			return y
		}
	}
	return nil
}

// config returns the configuration file: the service of the collectors, and the services of fast sinks.
func (x *experiment) config(fast bool) string {
	var b strings.Builder
	b.WriteString("services:\n")
	service := func(name, ns, options string, at netip.AddrPort, members []string) {
		fmt.Fprintf(&b, "  %s:\n    listen: [udp %s, tcp %s]\n    netns: %s\n    steer: {slots: %d, seed: %d%s}\n    members:\n",
			name, at, at, ns, len(members), uint32(x.env.Seed), options)
		for i, m := range members {
			fmt.Fprintf(&b, "      - {slot: %d, %s}\n", i, m)
		}
	}
	for _, f := range x.fast {
		if !fast || !f.steered {
			continue
		}
		var members []string
		for _, pid := range f.pids {
			members = append(members, fmt.Sprintf("pid: %d", pid))
		}
		service("fast-"+f.name, f.ns, f.options, f.service(), members) // the bind address of its sinks
	}
	if y := x.way(weir); y != nil {
		var members []string
		for _, c := range y.collectors {
			members = append(members, "pidfile: "+c.PIDFile)
		}
		service("telemetry", y.ns, "", netip.AddrPortFrom(netip.IPv4Unspecified(), port), members)
	}
	return b.String()
}

// steer runs weir like a user, for the collectors and for the fast sinks.
func (x *experiment) steer(ctx context.Context) error {
	x.service = &rig.Service{Name: "fast-" + shipped + "-0"}
	if y := x.way(weir); y != nil {
		x.service = &rig.Service{Name: "telemetry", Collectors: y.collectors}
	}
	var err error
	if x.weir, err = rig.NewWeirFrom(x.env, x.config(true), x.service); err != nil {
		return err
	}
	if err := x.weir.Apply(ctx, "--allow-outage"); err != nil { // the collectors are still opening their sockets
		return err
	}
	if x.serve, err = x.weir.Serve(); err != nil {
		return err
	}
	if y := x.way(weir); y != nil {
		// The work of weir's own process is charged to weir.
		if err := y.group.Claim(x.serve.PID); err != nil {
			return err
		}
		y.between = []*lab.Process{x.serve}
	}
	x.collectors, err = x.service.Where(ctx, x.devices)
	return err
}

// collectorsAlone removes the services of the fast sinks. weir serve then has no more services than a
// user's.
func (x *experiment) collectorsAlone(ctx context.Context) error {
	if x.way(weir) == nil {
		return nil
	}
	x.weir.Rewrite(x.config(false))
	return x.weir.Apply(ctx)
}

// relay starts the intermediaries of the existing way for collectors and fast sinks. They choose the same
// collector as weir for every router.
func (x *experiment) relay(ctx context.Context) error {
	if y := x.way(existing); y != nil {
		x.relays = append(x.relays, relay{site: y.site})
	}
	for _, f := range x.fast {
		if f.path == relayed {
			x.relays = append(x.relays, relay{site: f.site})
		}
	}
	for i, r := range x.relays {
		between, err := r.relay(x.env, x.collectors, r.behind(), r.name == existing)
		if err != nil {
			return err
		}
		x.relays[i].between = between
		if r.name == existing {
			x.way(existing).between = between
		}
	}
	for _, r := range x.relays {
		if err := r.relayed(ctx, r.between); err != nil {
			return err
		}
	}
	return nil
}

// collectorsReady waits until the collectors have their sockets and weir has adopted its own.
func (x *experiment) collectorsReady(ctx context.Context) error {
	for _, y := range x.ways {
		for i := range y.collectors {
			if err := y.ready(ctx, i); err != nil {
				return err
			}
		}
	}
	if x.way(weir) == nil {
		return nil
	}
	if err := x.service.Admitted(ctx, 60*time.Second); err != nil {
		return err
	}
	return x.sameBuffers()
}

// finish sets the metrics of the rounds and removes weir.
func (x *experiment) finish(ctx context.Context) error {
	for name, all := range x.total {
		x.result.Set("us_total_"+name, median(all))
	}
	for _, other := range []string{existing, direct} {
		if all := x.total[other]; len(all) > 0 {
			x.result.Set("cpu_total_ratio_"+other, median(ratios(x.total[weir], all)))
		}
	}
	others := 0
	for _, y := range x.ways {
		x.result.Set("miscounted_"+y.name, float64(x.miscounted[y.name]))
		if y.name != weir {
			others += x.miscounted[y.name]
		}
		for _, text := range y.tally.oddities() {
			x.result.Note("%s: %s", y.name, text)
		}
	}
	if len(x.ways) > 0 {
		x.result.Set("miscounted_others", float64(others))
		x.result.Set("devices", float64(len(x.devices)))
		x.result.Set("messages", float64(2*x.rounds*x.sweeps*len(x.devices)))
	}
	return x.weir.Remove(ctx)
}

// claims evaluates weir's promises. Each claim needs the compared ways.
func (x *experiment) claims() {
	for _, c := range []struct {
		needs               string
		kind                lab.Kind
		claim, metric, want string
	}{
		{weir, lab.Correctness, "every message through weir was counted once at a collector", "miscounted_weir", "== 0"},
		{weir, lab.Correctness, "the other collector's routers notice nothing of a restart", "restart_collateral", "== 0"},
		{"", lab.Correctness, "fast sinks read every message, with both engines", "lost_fast", "== 0"},
		{weir, lab.Performance, "the other ways carried the same messages", "miscounted_others", "== 0"},
		{existing, lab.Performance, "total CPU, relative to HAProxy and a tee", "cpu_total_ratio_existing", "<= 0.81"},
		{direct, lab.Performance, "total CPU, relative to direct connections", "cpu_total_ratio_direct", "<= 1.04"},
		{existing, lab.Performance, "path CPU of a BMP message, relative to HAProxy", "cpu_path_ratio_haproxy", "<= 0.35"},
		{existing, lab.Performance, "path CPU of a datagram, relative to a tee", "cpu_path_ratio_tee", "<= 0.6"},
		{"", lab.Performance, "a datagram by sk_reuseport, relative to plain SO_REUSEPORT", "overhead_ratio_reuseport", "<= 1.03"},
		{"", lab.Performance, "a datagram by sk_lookup, relative to plain SO_REUSEPORT", "overhead_ratio_lookup", "<= 1.15"},
	} {
		if c.needs != "" && x.way(c.needs) == nil || c.kind == lab.Performance && x.env.Size == lab.Smoke {
			continue
		}
		x.result.Claim(c.kind, c.claim, c.metric, c.want)
	}
}

// ratios divides round by round: a slow machine slows both.
func ratios(a, b []float64) []float64 {
	r := make([]float64, len(a))
	for i := range a {
		r[i] = a[i] / b[i]
	}
	return r
}

// median sorts a copy. For an even number it returns the mean of the middle two.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

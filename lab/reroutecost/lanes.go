// SPDX-License-Identifier: Apache-2.0

package reroutecost

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/reroutecost/bpf"
	"github.com/weir-project/weir/lab/topo"
)

// lane is a path of packets through the router: an input and a destination.
type lane struct {
	name  string
	in    string // device
	to    string // destination
	frame []byte
	each  []float64 // CPU time of a packet in ns, by round
}

// bench is a router. All its links go to one neighbour, a sink with a counter. The fast program does not run
// at in0: the device's forwarding sysctl is off. The sysctl does not stop forwarding, because the kernel
// forwards IPv6 by the setting of all devices.
type bench struct {
	x           *experiment
	router, far *netns.Handle
	name        string // of the router's namespace
	c           *kernel.Collection
	root        *kernel.Root
	lanes       []*lane
	cpu         int
	ksoftirqd   int // the thread handling many packets of the CPU; 0: not found
}

// Lanes. up and rerouted are protected; kernel has a route with encap seg6 of the same segments.
const (
	lanePlain    = "plain"
	laneUp       = "up"
	laneKernel   = "kernel"
	laneSlow     = "rerouted_egress"
	laneFast     = "rerouted"
	laneStranger = "stranger" // unprotected, past the fast program
)

func (x *experiment) measureCost(ctx context.Context) error {
	b, err := x.newBench(ctx)
	if err != nil {
		return err
	}
	x.say("cost of a packet, %d ways in turn: at most %d rounds", len(b.lanes), x.rounds)
	done := make(chan error, 1)
	go func() { done <- b.run(ctx) }()
	select {
	case err = <-done:
	case <-ctx.Done():
		return ctx.Err()
	}
	if err != nil {
		return err
	}
	b.report()
	return nil
}

func (x *experiment) newBench(ctx context.Context) (*bench, error) {
	b := &bench{x: x, root: kernel.OpenRoot(x.env.Root), cpu: runtime.NumCPU() - 1}
	var err error
	if b.router, b.name, err = x.env.Namespace("router"); err != nil {
		return nil, err
	}
	if b.far, _, err = x.env.Namespace("far"); err != nil {
		return nil, err
	}
	if err := b.wire(); err != nil {
		return nil, err
	}
	if err := b.programs(); err != nil {
		return nil, err
	}
	for name, way := range map[string][2]string{lanePlain: {"in0", "fd00:d0::2"}, laneUp: {"in0", "fd00:d1::2"}, laneKernel: {"in0", "fd00:d2::2"},
		laneSlow: {"in0", "fd00:d3::2"}, laneFast: {"in1", "fd00:d3::2"}, laneStranger: {"in1", "fd00:d0::2"}} {
		l := &lane{name: name, in: way[0], to: way[1]}
		if l.frame, err = b.frame(l); err != nil {
			return nil, err
		}
		b.lanes = append(b.lanes, l)
	}
	slices.SortFunc(b.lanes, func(a, b *lane) int { return strings.Compare(a.name, b.name) })
	return b, b.protect(ctx)
}

// wire creates the router's links, routes and neighbours.
func (b *bench) wire() error {
	if err := errors.Join(routerSysctls(b.router), topo.Sysctl(b.far, "net.ipv6.conf.default.accept_dad", "0")); err != nil {
		return err
	}
	for i, dev := range []string{"in0", "in1", "main0", "main1", "main3", "back"} {
		near := topo.End{NS: b.router, Name: dev, Addrs: []netip.Prefix{netip.PrefixFrom(linkAddr(i, 1), 64)}}
		far := topo.End{NS: b.far, Name: "f" + dev, Addrs: []netip.Prefix{netip.PrefixFrom(linkAddr(i, 2), 64)}}
		if err := errors.Join(topo.Cable(near, far), b.know(dev, linkAddr(i, 2))); err != nil {
			return err
		}
	}
	if err := topo.Sysctl(b.router, "net.ipv6.conf.in0.forwarding", "0"); err != nil {
		return err
	}
	if err := topo.Addresses(b.router, netip.MustParsePrefix("fc00:1::1/128")); err != nil {
		return err
	}
	for prefix, via := range map[string]int{"fd00:d0::/64": 2, "fd00:d1::/64": 3, "fd00:d3::/64": 4, "fc00:3::/32": 5} {
		if err := topo.Route(b.router, netip.MustParsePrefix(prefix), linkAddr(via, 2)); err != nil {
			return err
		}
	}
	return b.router.Do(func() error {
		// Without a source address for outer headers the kernel searches one for each packet.
		if ip, err := lab.Find("ip"); err == nil {
			if out, err := exec.Command(ip, "sr", "tunsrc", "set", "fc00:1::1").CombinedOutput(); err != nil {
				b.x.result.Note("ip sr tunsrc set: %v: %s", err, out)
			}
		}
		const encapRed = 3 // SEG6_IPTUN_MODE_ENCAP_RED, linux/seg6_iptunnel.h
		l, err := netlink.LinkByName("back")
		if err != nil {
			return err
		}
		// The library expects the segments in the order of the header.
		e := &netlink.SEG6Encap{Mode: encapRed, Segments: []net.IP{net.ParseIP(sidOut), net.ParseIP(sidVia)}}
		_, dst, _ := net.ParseCIDR("fd00:d2::/64")
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Encap: e})
	})
}

// Segments of the repair: a router on the path, and the router of decapsulation.
const (
	sidVia = "fc00:3::e"
	sidOut = "fc00:2::d6"
)

func linkAddr(link, end int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("fd00:1:%x::%d", link, end))
}

func routerSysctls(ns *netns.Handle) error {
	var err error
	for name, value := range map[string]string{"all.forwarding": "1", "all.seg6_enabled": "1", "default.seg6_enabled": "1",
		"all.accept_dad": "0", "default.accept_dad": "0"} { // no other node has an address here: skip the wait
		err = errors.Join(err, topo.Sysctl(ns, "net.ipv6.conf."+name, value))
	}
	return err
}

// know adds a permanent neighbour entry for the far end: neighbour discovery is not measured.
func (b *bench) know(dev string, a netip.Addr) error {
	mac, err := hardware(b.far, "f"+dev)
	if err != nil {
		return err
	}
	return b.router.Do(func() error {
		l, err := netlink.LinkByName(dev)
		if err != nil {
			return err
		}
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac})
	})
}

func hardware(ns *netns.Handle, dev string) (mac net.HardwareAddr, err error) {
	err = ns.Do(func() error {
		l, err := netlink.LinkByName(dev)
		if err == nil {
			mac = l.Attrs().HardwareAddr
		}
		return err
	})
	return mac, err
}

// programs loads both ends, and attaches the permanent programs.
func (b *bench) programs() error {
	spec, err := bpf.LoadCost()
	if err != nil {
		return err
	}
	if b.c, err = kernel.Load(spec, []string{"source", "pass", "sink"}, nil); err != nil {
		return err
	}
	b.x.env.OnClose(b.c.Close)
	for _, dev := range []string{"in0", "in1"} {
		if err := b.attach(b.router, dev, func(i int) kernel.Attachment { return kernel.XDP{Ifindex: i, Device: dev} }, "pass"); err != nil {
			return err
		}
	}
	for _, dev := range []string{"fmain0", "fmain1", "fmain3", "fback"} {
		if err := b.attach(b.far, dev, func(i int) kernel.Attachment { return kernel.TCX{Ifindex: i, Device: dev} }, "sink"); err != nil {
			return err
		}
	}
	// A test run of an unattached program waits for grace periods, some 25 ms.
	hold, _, err := b.x.env.Namespace("source")
	if err != nil {
		return err
	}
	return b.attach(hold, "lo", func(i int) kernel.Attachment { return kernel.XDP{Ifindex: i, Device: "lo", Generic: true} }, "source")
}

func (b *bench) attach(ns *netns.Handle, dev string, at func(index int) kernel.Attachment, program string) error {
	return ns.Do(func() error {
		l, err := netlink.LinkByName(dev)
		if err != nil {
			return err
		}
		ln, err := at(l.Attrs().Index).Attach(b.c.Programs[program])
		if err == nil {
			b.x.env.OnClose(func() { ln.Close() })
		}
		return err
	})
}

// frame returns a lane's packet: UDP, without a flow label.
func (b *bench) frame(l *lane) ([]byte, error) {
	mac, err := hardware(b.router, l.in)
	if err != nil {
		return nil, err
	}
	f := append(append([]byte{}, mac...), 2, 0, 0, 0, 0, 9, 0x86, 0xdd)
	f = append(f, packet6(netip.MustParseAddr("fd00:a::2"), netip.MustParseAddr(l.to), 4000, 9, []byte{1, 2})...)
	return f, nil
}

// packet6 returns a UDP packet over IPv6.
func packet6(from, to netip.Addr, sport, dport uint16, payload []byte) []byte {
	p := binary.BigEndian.AppendUint32(nil, 6<<28)
	p = append(binary.BigEndian.AppendUint16(p, uint16(8+len(payload))), unix.IPPROTO_UDP, 64)
	p = append(append(p, from.AsSlice()...), to.AsSlice()...)
	udp := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, sport), dport)
	udp = append(binary.BigEndian.AppendUint16(udp, uint16(8+len(payload))), 0, 0)
	udp = append(udp, payload...)
	binary.BigEndian.PutUint16(udp[6:], checksum(p[8:40], udp, unix.IPPROTO_UDP))
	return append(p, udp...)
}

// protect protects two links: one stays up, one stays drained. weir's watcher enables the fast program.
func (b *bench) protect(ctx context.Context) error {
	repair := protect.Repair{Segments: []netip.Addr{netip.MustParseAddr(sidVia), netip.MustParseAddr(sidOut)}}
	c := protect.Config{Paths: []protect.Path{
		{Name: "up", Netns: b.name, Device: "main1", Repairs: []protect.Repair{repair}},
		{Name: "down", Netns: b.name, Device: "main3", Repairs: []protect.Repair{repair}}}}
	if err := apply(ctx, b.x.env, b.root, c); err != nil {
		return err
	}
	if err := locked(ctx, b.root, func(l *kernel.WriteLock) error { return protect.Drain(l, "down") }); err != nil {
		return err
	}
	return watchFor(ctx, b.x, b.root)
}

// apply works like weir apply, and registers its removal at the end.
func apply(ctx context.Context, e *lab.Env, root *kernel.Root, c protect.Config) error {
	if errs := c.Validate(); len(errs) > 0 {
		return errors.Join(errs...)
	}
	e.OnClose(func() {
		_ = locked(context.Background(), root, func(l *kernel.WriteLock) error { return protect.Remove(context.Background(), l) })
	})
	return locked(ctx, root, func(l *kernel.WriteLock) error {
		st, err := protect.ReadState(ctx, root)
		if err != nil {
			return err
		}
		p, err := protect.Plan(ctx, st, c)
		if err != nil || len(p.Warnings) > 0 {
			return errors.Join(err, errors.New(strings.Join(p.Warnings, "; ")))
		}
		return protect.Apply(ctx, l, p)
	})
}

func locked(ctx context.Context, root *kernel.Root, f func(*kernel.WriteLock) error) error {
	l, err := root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	return f(l)
}

// logger forwards the watcher's log to the run's notes.
type logger struct{ x *experiment }

func (l logger) Info(msg string, a ...any) { l.x.say("weir: %s %v", msg, a) }
func (l logger) Warn(msg string, a ...any) { l.x.result.Note("weir: %s %v", msg, a) }

// watchFor runs weir's watcher until the experiment ends.
func watchFor(ctx context.Context, x *experiment, root *kernel.Root) error {
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = protect.Run(ctx, root, logger{x})
	}()
	x.env.OnClose(func() { stop(); <-ended })
	return nil
}

// run measures each lane in every round, with another one first in each.
func (b *bench) run(ctx context.Context) error {
	return onOneCPU(b.cpu, func() error {
		b.ksoftirqd = findKsoftirqd(b.cpu)
		if err := b.wait(ctx); err != nil {
			return err
		}
		const enough = 15
		deadline := time.Now().Add(b.x.costFor)
		for i := 0; i < b.x.rounds && (i < enough || time.Now().Before(deadline)); i++ {
			for turn := range b.lanes {
				l := b.lanes[(turn+i)%len(b.lanes)]
				each, err := b.cost(l, b.x.burst)
				if err = errors.Join(err, ctx.Err()); err != nil {
					return fmt.Errorf("lane %s: %w", l.name, err)
				}
				l.each = append(l.each, each)
			}
		}
		return nil
	})
}

// wait waits until packets are rerouted at their input.
func (b *bench) wait(ctx context.Context) error {
	for end := time.Now().Add(60 * time.Second); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
		for _, l := range b.lanes {
			if l.name != laneFast {
				continue
			}
			if _, err := b.cost(l, 64); err != nil {
				return err
			}
		}
		st, err := protect.ReadState(ctx, b.root)
		if err != nil {
			return err
		}
		for _, p := range st.Paths {
			if p.Counts.Fast > 0 {
				return nil
			}
		}
	}
	return errors.Join(ctx.Err(), errors.New("no packet was rerouted at its input within 60 s"))
}

// report sets the metrics: the ratio to the plain packets of the same round, and its median over the
// rounds.
func (b *bench) report() {
	lanes := map[string][]float64{}
	for _, l := range b.lanes {
		lanes[l.name] = l.each
		b.x.result.Set("ns_"+l.name, median(l.each))
	}
	plain := lanes[lanePlain]
	ratio := func(metric, name string) {
		var all []float64
		for i, each := range lanes[name] {
			all = append(all, plain[i]/each)
		}
		b.x.result.Set(metric, median(all))
	}
	ratio("up_ratio", laneUp)
	ratio("reroute_ratio", laneFast)
	ratio("reroute_egress_ratio", laneSlow)
	ratio("kernel_seg6_ratio", laneKernel)
	ratio("stranger_ratio", laneStranger)
	b.x.result.Set("rounds", float64(len(plain)))
}

func median(of []float64) float64 {
	s := slices.Sorted(slices.Values(of))
	if len(s) == 0 {
		return 0
	}
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab/topo"
)

// hookPackets is the number of packets of a round at one hook.
const hookPackets = 5000

// probe is a program at a hook, timed by the kernel.
type probe struct {
	name    string // of the metric
	program *ebpf.Program
	send    func() error // hookPackets
	each    []float64    // ns, by round
}

// measureHooks measures the program of one rule at each hook, timed by the kernel. The packets arrive at
// the loopback device and match nothing. The time includes the cost of the timing, some 20 ns.
func (x *experiment) measureHooks(ctx context.Context) error {
	x.say("cost of one rule at each hook, measured by the kernel")
	src, err := x.newSource("hooks", anywhere(rand.New(rand.NewPCG(x.env.Seed, 5))))
	if err != nil {
		return err
	}
	defer src.close()
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return fmt.Errorf("enable program statistics of the kernel (Linux 5.8): %w", err)
	}
	defer stats.Close()
	var probes []*probe
	for rule, match := range map[string]string{"1rule": fmt.Sprintf("udp.dstport == %d", measuredPort+1), "5terms": tenRules[0]} {
		for _, p := range locations() {
			if p.name == "xdp" || p.name == "socket-raw" {
				continue // the loopback device has generic XDP only
			}
			pr, remove, err := x.probe(p, rule, match, src)
			if err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			defer remove()
			probes = append(probes, pr)
		}
	}
	err = inTurns(ctx, x.rounds, x.costFor, len(probes), func(way int) error { return probes[way].round() })
	if err != nil {
		return x.unlessLive(err, "no measurement of hooks")
	}
	for _, p := range probes {
		x.result.Set(p.name, median(p.each))
	}
	return nil
}

// probe attaches the program of one rule to a hook of its own namespace. Undecided packets are dropped.
func (x *experiment) probe(p *location, rule, match string, src *source) (*probe, func(), error) {
	ns, _, err := x.env.Namespace("probe-" + p.name + "-" + rule)
	if err != nil {
		return nil, nil, err
	}
	if err := topo.Addresses(ns); err != nil {
		return nil, nil, err
	}
	prog, _, unload, err := load([]compile.Rule{{Name: rule, Match: expr.MustParse(match), Action: compile.Pass}},
		compile.Options{Hook: p.hook, Start: p.start, Default: compile.Drop})
	if err != nil {
		return nil, nil, err
	}
	detach, err := p.attach(&world{host: ns, ifindex: 1}, x.env.Root, prog)
	if err != nil {
		unload()
		return nil, nil, err
	}
	pr := &probe{name: "ns_bpf_" + strings.ReplaceAll(p.name, "-", "_") + "_" + rule, program: prog,
		send: func() error { return ns.Do(func() error { return src.send(hookPackets) }) }}
	if p.hook == compile.Socket {
		pr.send = toSocket(ns)
	}
	return pr, func() { detach(); unload() }, nil
}

// toSocket sends to the sockets of a location, on one of its ports.
func toSocket(ns *netns.Handle) func() error {
	return func() error {
		return ns.Do(func() error {
			c, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), ports[0])))
			if err != nil {
				return err
			}
			defer c.Close()
			for range hookPackets {
				if _, err := c.Write([]byte("a payload of bytes")); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

func (p *probe) round() error {
	before, err := p.program.Stats()
	if err != nil {
		return err
	}
	if err := p.send(); err != nil {
		return err
	}
	after, err := p.program.Stats()
	if err != nil {
		return err
	}
	runs := after.RunCount - before.RunCount
	if runs < hookPackets {
		return fmt.Errorf("the kernel counted %d runs, want %d", runs, hookPackets)
	}
	p.each = append(p.each, float64(after.Runtime-before.Runtime)/float64(runs))
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/lab"
)

// work is a kind of traffic for fast sinks.
type work string

const (
	datagrams   work = "datagram"
	messages    work = "message"
	connections work = "connection"
)

// twins is the number of hosts of each path. Two equal hosts differ by some percent in the cost of a
// datagram, for as long as they run. Their memory and the hash chains of their sockets differ. This is more
// than weir adds. spread_datagram_plain shows the spread among the hosts of plain SO_REUSEPORT.
const twins = 3

// Fast sites, by the selection between their two sinks.
const (
	plain     = "plain"     // SO_REUSEPORT: the kernel's own hash
	lookup    = "lookup"    // weir at sk_lookup alone: without templates
	reuseport = "reuseport" // weir at sk_reuseport alone: without templates
	shipped   = "weir"      // weir with its defaults
	relayed   = "relayed"   // HAProxy and nfacctd as a tee; the sinks have their own ports
)

// buildFast creates the fast sites.
func (x *experiment) buildFast(ctx context.Context, relay bool) error {
	same := func(s *site) []netip.AddrPort { return []netip.AddrPort{s.service(), s.service()} }
	kinds := []struct {
		name    string
		steered bool
		options string // of steer, in weir.yaml
		at      func(*site) []netip.AddrPort
	}{
		{plain, false, "", same},
		{lookup, true, ", engine: sk_lookup, templates: false", same},
		{reuseport, true, ", engine: sk_reuseport, templates: false", same},
		{shipped, true, "", same},
		{relayed, false, "", (*site).behind},
	}
	if !relay {
		kinds = kinds[:len(kinds)-1]
	}
	n := twins
	if x.env.Size == lab.Smoke {
		n = 1
	}
	for i := range n {
		for _, k := range kinds {
			name := fmt.Sprintf("%s-%d", k.name, i)
			f, err := newFastSite(x.world, "fast-"+name, k.at)
			if err != nil {
				return err
			}
			f.name, f.path, f.steered, f.options = name, k.name, k.steered, k.options
			x.fast = append(x.fast, f)
		}
	}
	for _, f := range x.fast {
		if err := f.ready(ctx); err != nil {
			return err
		}
	}
	return nil
}

// paths measures the cost of the path to a process. The processes at its end only read.
func (x *experiment) paths(ctx context.Context) error {
	x.say("fast sinks: cost of a datagram, a message and a connection by each path, in turn")
	for _, f := range x.fast {
		defer f.close()
		// Without message measurements, connections would only use up the process's descriptors.
		if err := f.connect(ctx, x.dialer, x.devices, f.path == plain || f.path == shipped || f.path == relayed); err != nil {
			return err
		}
	}
	for _, c := range []struct {
		work  work
		sites []string
	}{
		{datagrams, []string{plain, lookup, reuseport, shipped, relayed}},
		{messages, []string{plain, shipped, relayed}},
		{connections, []string{plain, lookup, reuseport}},
	} {
		if err := x.interleave(ctx, c.work, c.sites); err != nil {
			return err
		}
	}
	x.result.Set("lost_fast", 0) // a loss would have returned an error
	for _, r := range []struct {
		metric   string
		work     work
		of, over string
	}{
		{"overhead_ratio_lookup", datagrams, lookup, plain},
		{"overhead_ratio_reuseport", datagrams, reuseport, plain},
		{"connect_ratio_lookup", connections, lookup, plain},
		{"connect_ratio_reuseport", connections, reuseport, plain},
		{"overhead_ratio_weir", datagrams, shipped, plain},
		{"cpu_path_ratio_tee", datagrams, shipped, relayed},
		{"cpu_path_ratio_haproxy", messages, shipped, relayed},
		{"cpu_path_ratio_haproxy_floor", messages, plain, relayed}, // the value without any intermediary
	} {
		if over := x.costs[r.work][r.over]; len(over) > 0 {
			x.result.Set(r.metric, median(ratios(x.costs[r.work][r.of], over)))
		}
	}
	return nil
}

// interleave runs the work on each site, one after the other, and records the cost of each path's hosts,
// round by round. It draws the order for every round. In a fixed order the same site would always find the
// caches as left by the tee.
func (x *experiment) interleave(ctx context.Context, w work, paths []string) error {
	var sites []*fastSite
	for _, f := range x.fast {
		if slices.Contains(paths, f.path) {
			sites = append(sites, f)
		}
	}
	effort := x.plan.fast[w]
	costs, hosts := map[string][]float64{}, map[*fastSite][]float64{}
	draw := rand.New(rand.NewPCG(x.env.Seed, 0))
	round := 0
	for begin := time.Now(); round < effort.rounds && (round < fewest || time.Since(begin) < effort.limit); round++ {
		us := make([]float64, len(sites))
		for _, i := range draw.Perm(len(sites)) {
			var err error
			if us[i], err = x.do(ctx, sites[i], w, effort.messages); err != nil {
				return err
			}
		}
		for i, f := range sites {
			costs[f.path] = append(costs[f.path], us[i])
			hosts[f] = append(hosts[f], us[i])
		}
	}
	for path, all := range costs {
		x.result.Set("us_"+string(w)+"_"+path, median(all))
	}
	var of []float64
	for f, all := range hosts {
		if f.path == plain {
			of = append(of, median(all))
		}
	}
	if len(of) > 0 {
		x.result.Set("spread_"+string(w)+"_"+plain, slices.Max(of)/slices.Min(of))
	}
	x.result.Set("rounds_"+string(w), float64(round))
	x.costs[w] = costs
	return nil
}

func (x *experiment) do(ctx context.Context, f *fastSite, w work, n int) (float64, error) {
	switch w {
	case datagrams:
		return f.datagrams(ctx, n)
	case messages:
		return f.messages(ctx, n)
	}
	return f.connections(ctx, x.dialer, x.devices, n)
}

// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"time"
)

// work is what fast sinks are sent.
type work string

const (
	datagrams   work = "datagram"
	messages    work = "message"
	connections work = "connection"
)

// Fast sites, by what chooses between their two sinks.
const (
	plain     = "plain"     // SO_REUSEPORT: the kernel's own hash
	lookup    = "lookup"    // weir at sk_lookup, and nothing more: without templates
	reuseport = "reuseport" // weir at sk_reuseport, likewise
	shipped   = "weir"      // weir as it is if one says nothing
	relayed   = "relayed"   // HAProxy and nfacctd as a tee, with sinks on ports of their own
)

// buildFast makes the fast sites.
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
	for _, k := range kinds {
		f, err := newFastSite(x.world, "fast-"+k.name, k.at)
		if err != nil {
			return err
		}
		f.name, f.steered, f.options = k.name, k.steered, k.options
		x.fast = append(x.fast, f)
	}
	for _, f := range x.fast {
		if err := f.ready(ctx); err != nil {
			return err
		}
	}
	return nil
}

// paths measures what the way to a process costs by itself, with processes at its end that do nothing but read.
func (x *experiment) paths(ctx context.Context) error {
	x.say("fast sinks: what a datagram, a message and a connection cost by each path, in turn")
	for _, f := range x.fast {
		defer f.close()
		if err := f.connect(ctx, x.dialer, x.devices); err != nil {
			return err
		}
	}
	for _, c := range []struct {
		work  work
		sites []string
	}{
		{datagrams, []string{plain, lookup, reuseport, shipped, relayed}},
		{messages, []string{shipped, relayed}},
		{connections, []string{plain, lookup, reuseport}},
	} {
		if err := x.interleave(ctx, c.work, c.sites); err != nil {
			return err
		}
	}
	x.result.Set("lost_fast", 0) // else there had been an error
	for _, r := range []struct {
		metric, of, over string
	}{
		{"overhead_ratio_lookup", "us_datagram_lookup", "us_datagram_plain"},
		{"overhead_ratio_reuseport", "us_datagram_reuseport", "us_datagram_plain"},
		{"connect_ratio_lookup", "us_connection_lookup", "us_connection_plain"},
		{"connect_ratio_reuseport", "us_connection_reuseport", "us_connection_plain"},
		{"overhead_ratio_weir", "us_datagram_weir", "us_datagram_plain"},
		{"cpu_path_ratio_tee", "us_datagram_weir", "us_datagram_relayed"},
		{"cpu_path_ratio_haproxy", "us_message_weir", "us_message_relayed"},
	} {
		if over := x.result.Metrics[r.over]; over > 0 {
			x.result.Set(r.metric, x.result.Metrics[r.of]/over)
		}
	}
	return nil
}

// interleave has each site do the work, one after the other, and enters the median cost of each. The order is drawn
// for every round: in a fixed one, the same site would always find the caches as the tee has left them.
func (x *experiment) interleave(ctx context.Context, w work, names []string) error {
	var sites []*fastSite
	for _, f := range x.fast {
		for _, n := range names {
			if f.name == n {
				sites = append(sites, f)
			}
		}
	}
	effort := x.plan.fast[w]
	costs := map[string][]float64{}
	draw := rand.New(rand.NewPCG(x.env.Seed, 0))
	round := 0
	for begin := time.Now(); round < effort.rounds && (round < fewest || time.Since(begin) < effort.limit); round++ {
		for _, i := range draw.Perm(len(sites)) {
			f := sites[i]
			us, err := x.do(ctx, f, w, effort.messages)
			if err != nil {
				return err
			}
			costs[f.name] = append(costs[f.name], us)
		}
	}
	for name, all := range costs {
		x.result.Set("us_"+string(w)+"_"+name, median(all))
	}
	x.result.Set("rounds_"+string(w), float64(round))
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

// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

func init() {
	lab.Register(lab.Experiment{Name: "steer-compare", Short: "x", Run: run})
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	w, err := newWorld(e)
	if err != nil {
		return err
	}
	at := func(s *site) netip.AddrPort { return s.service() }
	var fast []*fastSite
	for _, n := range []string{"plain", "lookup", "plain2"} {
		f, err := newFastSite(w, n, at, at)
		if err != nil {
			return err
		}
		fast = append(fast, f)
	}
	for _, f := range fast {
		if err := f.ready(ctx); err != nil {
			return err
		}
	}
	config := "services:\n"
	l := fast[1]
	config += fmt.Sprintf("  fast:\n    listen: [udp 0.0.0.0:%d, tcp 0.0.0.0:%d]\n    netns: %s\n    steer: {slots: 2}\n    members: [{slot: 0, pid: %d}, {slot: 1, pid: %d}]\n", port, port, l.ns, l.pids[0], l.pids[1])
	weir, err := rig.NewWeirFrom(e, config)
	if err != nil {
		return err
	}
	if err := weir.Apply(ctx); err != nil {
		return err
	}
	out, err := weir.Run(ctx, "steer", "status")
	e.Watch.Say("%s %v", out, err)
	var devices []netip.Addr
	for a := devices4.Addr().Next(); len(devices) < 512; a = a.Next() {
		devices = append(devices, a)
	}
	d := routers.NewDialer(w.routers)
	for _, f := range fast {
		if err := f.connect(ctx, d, devices, true); err != nil {
			return err
		}
	}
	do := func(what string, rounds int, f func(*fastSite) (float64, error)) error {
		all := map[string][]float64{}
		for i := range rounds {
			for j := range fast {
				s := fast[(i+j)%len(fast)]
				c, err := f(s)
				if err != nil {
					return err
				}
				all[s.name] = append(all[s.name], c)
			}
		}
		for _, s := range fast {
			var ratios []float64
			for i, v := range all[s.name] {
				ratios = append(ratios, v/all["plain"][i])
			}
			slices.Sort(ratios)
			v := all[s.name]
			slices.Sort(v)
			e.Watch.Say("%s %s: %.3f µs [%.3f %.3f], ratio %.3f [%.3f %.3f] %.3f", what, s.name, v[len(v)/2], v[len(v)/10], v[len(v)*9/10], ratios[len(ratios)/2], ratios[len(ratios)/4], ratios[len(ratios)*3/4], v[len(v)/2]/all["plain"][len(v)/2])
		}
		return nil
	}
	begin := time.Now()
	if err := do("datagram", 150, func(s *fastSite) (float64, error) { return s.datagrams(ctx, 1920) }); err != nil {
		return err
	}
	e.Watch.Say("took %s", time.Since(begin))
	begin = time.Now()
	if err := do("message", 10, func(s *fastSite) (float64, error) { return s.messages(ctx, 8192) }); err != nil {
		return err
	}
	e.Watch.Say("took %s", time.Since(begin))
	begin = time.Now()
	if err := do("connection", 10, func(s *fastSite) (float64, error) { return s.connections(ctx, d, devices, 512) }); err != nil {
		return err
	}
	e.Watch.Say("took %s", time.Since(begin))
	return nil
}

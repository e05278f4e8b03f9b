// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// TestRemovalOutages checks that removing a backend is an outage while its agent is connected, in every plan. It is
// none once the backend is drained or its agent has ended. Another number, a missing device, and an address without a
// load balancer are outages too.
func TestRemovalOutages(t *testing.T) {
	w := newNetwork(t, 2, at4)
	cert, key, ca := w.ca.Files("lb")
	w.play(w.middle, "lb", fmt.Sprintf(`
listen: 0.0.0.0:7946
tls: {certificate: %s, key: %s, ca: %s}
devices: [c, s1, s2]
register: true
services:
  talk: {number: 3, listen: [tcp %s]}
`, cert, key, ca, w.at))
	var stop func()
	for i, s := range w.servers {
		s.keep()
		end := w.playBackend(i, s)
		s.serve()
		if i == 0 {
			stop = end
		}
	}
	s := w.servers[0]
	w.eventually("the backend is connected", func() bool { st := s.status(); return st.LB && st.Keeper && len(st.Peers) == 1 })
	cert, key, ca = w.ca.Files("s1")
	spec := Config{Name: "s1", Number: 1, Devices: []string{"w0"}, Listen: "127.0.0.1:7947"}
	spec.TLS.Certificate, spec.TLS.Key, spec.TLS.CA = cert, key, ca
	l, err := w.root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.in(s.ns, func() error { return applied.Publish(l, spec) })
	l.Unlock()
	plan := func(change func(ctx context.Context, r *kernel.Root, have State) (feature.Plan, error)) (p feature.Plan) {
		t.Helper()
		w.in(s.ns, func() error {
			have, err := Feature{}.State(t.Context(), w.root)
			if err == nil {
				p, err = change(t.Context(), w.root, have)
			}
			return err
		})
		return p
	}
	without := func(ctx context.Context, _ *kernel.Root, have State) (feature.Plan, error) {
		return Feature{}.Plan(ctx, have, Config{})
	}
	short := func(ctx context.Context, r *kernel.Root, _ State) (feature.Plan, error) {
		return PlanRemoveHere(ctx, r)
	}
	changed := func(to func(*Config)) func(context.Context, *kernel.Root, State) (feature.Plan, error) {
		c := spec
		to(&c)
		return func(ctx context.Context, _ *kernel.Root, have State) (feature.Plan, error) {
			return Feature{}.Plan(ctx, have, c)
		}
	}
	renumbered := changed(func(c *Config) { c.Number = 7 })
	misspelt := changed(func(c *Config) { c.Devices = []string{"w9"} })
	elsewhere := changed(func(c *Config) { c.LB.Address = "127.0.0.1:9" })
	const noFlows = "its load balancer then sends it no new flows"
	for name, p := range map[string]feature.Plan{"a file without it": plan(without), "the short command": plan(short), "another number": plan(renumbered), "an absent device": plan(misspelt), "an lb.address without an answer": plan(elsewhere)} {
		if len(p.Steps) != 1 || !strings.Contains(strings.Join(p.Outages, "\n"), noFlows) {
			t.Errorf("%s: steps %v, outages %q", name, p.Steps, p.Outages)
		}
	}
	if p := plan(changed(func(c *Config) { c.MaxQueues = 1 << 20 })); len(p.Steps) != 1 || len(p.Outages) > 0 {
		t.Errorf("another limit: steps %v, outages %q", p.Steps, p.Outages)
	}
	if p := plan(changed(func(c *Config) { c.Listen = "192.0.2.77:7947" })); len(p.Steps) != 1 || len(p.Outages) != 1 || !strings.Contains(p.Outages[0], "no interface has 192.0.2.77, and agents connect to 127.0.0.1:7947 now") {
		t.Errorf("an absent listen: steps %v, outages %q", p.Steps, p.Outages)
	}
	looped := changed(func(c *Config) { c.Devices = []string{"w0", "lo"} })
	if p := plan(looped); len(p.Steps) != 1 || len(p.Outages) != 1 || !strings.Contains(p.Outages[0], `devices: "lo": the load balancer's packets do not use the loopback`) {
		t.Errorf("the loopback: steps %v, outages %q", p.Steps, p.Outages)
	}
	if p := plan(func(ctx context.Context, _ *kernel.Root, have State) (feature.Plan, error) {
		before := *have.Spec // applied by an older weir
		before.Devices = []string{"w0", "lo"}
		have.Spec = &before
		return looped(ctx, nil, have)
	}); len(p.Outages) > 0 || !strings.Contains(strings.Join(p.Warnings, "\n"), `devices: "lo"`) {
		t.Errorf("the loopback in force: outages %q, warnings %q", p.Outages, p.Warnings)
	}
	if p, err := (Feature{}).PlanRemove(t.Context(), w.root); err != nil || len(p.Outages) != len(w.servers) {
		t.Errorf("removal in all network namespaces: outages %q, %v", p.Outages, err)
	}
	w.in(s.ns, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*longest)
		defer cancel()
		return DrainHere(ctx, "s1", Draining{}, func(Drained) {})
	})
	if p := plan(short); len(p.Steps) != 1 || len(p.Outages) > 0 {
		t.Errorf("drained: steps %v, outages %q", p.Steps, p.Outages)
	}
	stop()
	if p := plan(without); len(p.Steps) != 1 || len(p.Outages) > 0 {
		t.Errorf("its agent has ended: steps %v, outages %q", p.Steps, p.Outages)
	}
}

// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// applies records a spec in the pins, as weir apply does.
func (s *scene) applies(t *testing.T, root *kernel.Root, text string) {
	t.Helper()
	c, err := parseConfig("weir.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	l := s.lock(t, root)
	defer l.Unlock()
	do(t, s.middle, func() error { return applied.Publish(l, *c) })
}

// plan returns the plan of a file.
func (s *scene) plan(t *testing.T, root *kernel.Root, text string) (p feature.Plan) {
	t.Helper()
	c, err := parseConfig("weir.yaml", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	do(t, s.middle, func() error {
		have, err := Feature{}.State(t.Context(), root)
		if err == nil {
			p, err = Feature{}.Plan(t.Context(), have, *c)
		}
		return err
	})
	return p
}

// learned returns nil once a flow of a service is known.
func learned(root *kernel.Root, service int) error {
	all, err := Instances(root)
	if err != nil || len(all) != 1 {
		return fmt.Errorf("instances %v, %v", all, err)
	}
	f, err := View(root, all[0])
	if err != nil {
		return err
	}
	defer f.Close()
	none := fmt.Errorf("no flow of service %d", service)
	return errors.Join(f.Flows(func(k Key, _ Flow) bool {
		if k.Service == service {
			none = nil
		}
		return none != nil
	}), none)
}

// TestChangeOutages checks that a change with lost flows or lost services is an outage named in the
// plan, and other changes are none.
func TestChangeOutages(t *testing.T) {
	sc := newScene(t)
	sc.f.Close()
	serve(t, sc.hosts, service4)
	listenUDP(t, sc.hosts, flows4)
	root := kernel.OpenRoot(nstest.BPFFS + "/" + t.Name())
	t.Cleanup(func() {
		if err := Remove(context.Background(), root, sc.middle, "lb"); err != nil {
			t.Error(err)
		}
	})
	text := fileOf(peertest.NewAuthority(t), sc.devices, "startup_timeout: 100ms\nbackends:\n  h1: {number: 1, address: 10.2.0.2}\n  h2: {number: 2, address: 10.2.1.2}\n")
	stop := running(t, sc, root, text)
	sc.applies(t, root, text)
	status(t, root, func(s Status) bool { return s.Agent && len(s.Backends) == 2 && s.Backends[0].Up && s.Backends[1].Up })
	c := dial(t, sc.client, service4)
	got, err := ask(c, "a", patience)
	if err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, func() error { // the startup of the load balancer learns no source of a datagram
		if _, err := askUDP(dialUDP(t, sc.client, flows4), "a"); err != nil {
			return err
		}
		return learned(root, 1)
	})
	stop() // the data path works without an agent
	byOwner := map[byte]string{'1': "h1: {number: 1, address: 10.2.0.2}", '2': "h2: {number: 2, address: 10.2.1.2}"}
	owner, other := byOwner[got[0]], byOwner['1'+'2'-got[0]]
	const talk = `talk: {number: 0, listen: ["tcp 10.55.0.1:9000", "tcp [fd55::1]:9000"]}`
	for _, e := range []struct{ from, to, step, outage string }{
		{"  " + talk + "\n", "", `service talk (tcp 10.55.0.1:9000, tcp [fd55::1]:9000) removed`, "service talk at tcp 10.55.0.1:9000 is removed: 1 flow loses its backend, and so do new ones"},
		{"10.55.0.1:9000", "10.55.0.1:9001", "service talk (tcp 10.55.0.1:9001, tcp [fd55::1]:9000) added", "service talk at tcp 10.55.0.1:9000 is removed"},
		{"[fd55::1]:9000", "[fd55::1]:9001", "service talk (tcp 10.55.0.1:9000, tcp [fd55::1]:9001) added", "service talk at tcp [fd55::1]:9000 is removed: backends serve its new flows now"},
		{"talk: {number: 0", "other: {number: 0", "service other (tcp 10.55.0.1:9000, tcp [fd55::1]:9000) added", "service talk at tcp 10.55.0.1:9000 is called other"},
		{"talk: {number: 0", "talk: {number: 5", "service talk (tcp 10.55.0.1:9000, tcp [fd55::1]:9000) changed", "gets number 5 in place of 0"},
		{", by: source", "", "service flows (udp 10.55.0.1:4739) changed", "service flows at udp 10.55.0.1:4739 goes by flow in place of source: 1 flow loses"},
		{"devices: [c, ", "devices: [", "devices changed", "device c is removed"},
		{"devices: [c, ", "devices: [c0, ", "devices changed", "lb: devices: it works at c now, and would not at c0: there is no interface c0: correct the name"},
		{"devices: [c, ", "devices: [c, c0, ", "devices changed", ""},
		{owner + "\n", "", "backend " + owner[:2] + " removed", "; their next packets go to other backends, and connections are reset"},
		{owner, strings.Replace(owner, "number: ", "number: 10", 1), "backend " + owner[:2] + " changed", "backend " + owner[:2] + " gets number 10"},
		{owner, strings.Replace(owner, ".2}", ".9}", 1), "backend " + owner[:2] + " changed", "in place of 10.2."},
		{talk, talk + "\n  more: {number: 2, listen: [tcp 10.55.0.1:9002]}", "service more (tcp 10.55.0.1:9002) added", ""},
		{other, strings.Replace(other, "}", ", weight: 0}", 1), "backend " + other[:2] + " changed", ""},
		{"devices: ", "buffer_timeout: 2s\ndevices: ", "buffer_timeout changed", ""},
	} {
		if !strings.Contains(text, e.from) {
			t.Fatalf("no %q in\n%s", e.from, text)
		}
		p := sc.plan(t, root, strings.Replace(text, e.from, e.to, 1))
		if len(p.Steps) != 1 || !strings.HasPrefix(p.Steps[0].String(), "change load balancer lb: ") || !strings.Contains(p.Steps[0].String(), e.step) {
			t.Errorf("%q: steps %v, want %q", e.to, p.Steps, e.step)
		}
		all := strings.Join(p.Outages, "\n")
		if e.outage == "" && all != "" || !strings.Contains(all, e.outage) {
			t.Errorf("%q: outages %q, want %q", e.to, p.Outages, e.outage)
		}
	}
	if err := Remove(t.Context(), root, sc.middle, "lb"); err != nil {
		t.Fatal(err)
	}
	sc.applies(t, root, text)
	if p := sc.plan(t, root, strings.Replace(text, "  "+talk+"\n", "", 1)); len(p.Steps) != 1 || len(p.Outages) > 0 {
		t.Errorf("nothing is pinned, and the plan is %+v", p)
	}
}

// TestRegisterOutages checks that with register: true the removal of a backend from the file is an
// outage, unless its agent has registered it.
func TestRegisterOutages(t *testing.T) {
	sc := newScene(t)
	sc.f.Close()
	serve(t, sc.hosts, service4)
	root := kernel.OpenRoot(nstest.BPFFS + "/" + t.Name())
	t.Cleanup(func() {
		if err := Remove(context.Background(), root, sc.middle, "lb"); err != nil {
			t.Error(err)
		}
	})
	const one, two = "  h1: {number: 1, address: 10.2.0.2}\n", "  h2: {number: 2, address: 10.2.1.2}\n"
	ca := peertest.NewAuthority(t)
	text := fileOf(ca, sc.devices, "register: true\nbackends:\n"+one+two)
	stop := running(t, sc, root, text)
	sc.applies(t, root, text)
	status(t, root, func(s Status) bool { return s.Agent && len(s.Backends) == 2 && s.Backends[0].Up && s.Backends[1].Up })
	agent := registerTwo(t, sc, ca)
	status(t, root, func(s Status) bool { return s.Agent && s.Backends[1].Registered })
	nstest.Eventually(t, func() error {
		_, err := ask(dial(t, sc.client, service4), "a", patience)
		s, serr := Statuses(t.Context(), root)
		if err == nil && serr == nil && s[0].Backends[0].Flows > 0 && s[0].Backends[1].Flows > 0 {
			return nil
		}
		return fmt.Errorf("%+v, %v, %v", s, err, serr)
	})
	expect := func(from, to, outage string) {
		t.Helper()
		all := strings.Join(sc.plan(t, root, strings.Replace(text, from, to, 1)).Outages, "\n")
		if outage == "" && all != "" || !strings.Contains(all, outage) {
			t.Errorf("%q in place of %q: outages %q, want %q", to, from, all, outage)
		}
	}
	const addressless = "  h1: {number: 1}\n"
	expect(one, "", "backend h1 is removed: ")
	expect(one, "", "their packets are dropped until it registers, and it is not registered now: drain it first")
	expect(one, addressless, "backend h1 has no address any more: ")
	expect(two, "", "")
	expect(two, strings.Replace(two, "number: 2, address: 10.2.1.2", "number: 2", 1), "")
	agent.Close()
	status(t, root, func(s Status) bool { return s.Agent && !s.Backends[1].Connected })
	expect(two, "", "backend h2 is removed: ")
	stop() // nobody reports registrations
	expect(two, "", "backend h2 is removed: ")
}

// TestRegisteredOutages checks that a file that gives the number or address of a registered backend
// with flows to another name, or gives that backend another number or address, is an outage.
func TestRegisteredOutages(t *testing.T) {
	sc := newScene(t)
	sc.f.Close()
	serve(t, sc.hosts, service4)
	root := kernel.OpenRoot(nstest.BPFFS + "/" + t.Name())
	ca := peertest.NewAuthority(t)
	text := fileOf(ca, sc.devices, "register: true\n")
	stop := running(t, sc, root, text)
	t.Cleanup(func() {
		if err := Remove(context.Background(), root, sc.middle, "lb"); err != nil {
			t.Error(err)
		}
	})
	sc.applies(t, root, text)
	one := from(t, sc.hosts[0], ca, "h1", 1, "10.2.0.2")
	one.hears(t, func(p peer.Peers) bool { return len(ups(p)) == 1 })
	from(t, sc.hosts[1], ca, "h2", 2, "10.2.1.2").hears(t, func(p peer.Peers) bool { return len(ups(p)) == 2 })
	expect := func(backends, outage string) {
		t.Helper()
		all := strings.Join(sc.plan(t, root, text+"backends:\n  "+backends+"\n").Outages, "\n")
		if outage == "" && all != "" || !strings.Contains(all, outage) {
			t.Errorf("%s: outages %q, want %q", backends, all, outage)
		}
	}
	expect("new: {number: 1, address: 10.2.1.9}", "") // no flow yet
	if err := one.c.Register(peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 9}); err != nil {
		t.Fatal(err)
	}
	dialed(t, sc)
	expect("new: {number: 1, address: 10.2.1.9}", "backend new gets number 1 of registered backend h1: 1 flow loses its backend; drain h1 first")
	expect("h1: {number: 3}", "backend h1 gets number 3 in place of 1, and its flows are known by the old one: 1 flow")
	expect("h1: {number: 1, address: 10.2.1.9}", "backend h1 gets address 10.2.1.9 in place of 10.2.0.2: 1 flow")
	expect("h1: {number: 1, address: 10.2.0.2}", "")
	expect("new: {number: 3, address: 10.2.1.9}", "")
	expect("new: {number: 3, address: 10.2.0.2}", "backend new gets address 10.2.0.2 of registered backend h1: 1 flow loses its backend; drain h1 first")
	stop()
	expect("new: {number: 1}", "backend new gets number 1 of registered backend h1: 1 flow")
}

// TestRemovalOutages checks that every removal of a load balancer is an outage, including removals
// from another network namespace and without a file.
func TestRemovalOutages(t *testing.T) {
	sc, root := published(t)
	if p, err := (Feature{}).PlanRemove(t.Context(), root); err != nil || len(p.Outages) != 1 || !strings.Contains(p.Outages[0], "load balancer test of namespace") {
		t.Errorf("from another network namespace: %+v, %v", p, err)
	}
	plan := func(name string) (p feature.Plan, err error) {
		do(t, sc.middle, func() error { p, err = PlanRemoveHere(t.Context(), root, name); return nil })
		return p, err
	}
	if _, err := plan("other"); err == nil || !strings.Contains(err.Error(), "name one of test") {
		t.Errorf("another name: %v", err)
	}
	p, err := plan("test")
	if err != nil || len(p.Outages) != 1 || !strings.Contains(p.Outages[0], "load balancer test spreads traffic now") || len(p.Steps) != 1 {
		t.Fatalf("%+v, %v", p, err)
	}
	sc.f.Close()
	l := sc.lock(t, root)
	do(t, sc.middle, func() error { return p.Apply(t.Context(), l, nil) })
	l.Unlock()
	if left, err := Instances(root); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if p, err := plan("test"); err != nil || len(p.Steps)+len(p.Outages) > 0 {
		t.Errorf("nothing is there: %+v, %v", p, err)
	}
	sc.open(t, root) // for the end of the test
}

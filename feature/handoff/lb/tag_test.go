// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/spec"
)

// TestRetag checks that connections to an address keep their host when the service gets and loses
// another address, although the hash has changed.
func TestRetag(t *testing.T) {
	sc := newScene(t)
	one := Service{ID: 0, Listen: service4, Proto: unix.IPPROTO_TCP}
	two := Service{ID: 0, Listen: netip.MustParseAddrPort("10.55.0.77:9000"), Proto: unix.IPPROTO_TCP}
	set := func(services ...Service) []Service {
		t.Helper()
		services = spec.Tagged(services)
		if err := sc.f.setServices(services); err != nil {
			t.Fatal(err)
		}
		return services
	}
	set(one)
	c, k, owner, _ := session(t, sc)
	if _, err := sc.f.Change(k, func(fl *Flow) { fl.Epoch = 6 }); err != nil {
		t.Fatal(err)
	}
	hosts := slices.Clone(sc.f.backends)
	hosts[owner-1].Weight = 0
	if err := sc.f.SetBackends(hosts); err != nil {
		t.Fatal(err)
	}
	for _, services := range [][]Service{set(one, two), nil, {one}} {
		if services == nil { // the same again
			services = set(one, two)
		} else if len(services) == 1 {
			services = set(one)
		}
		at := slices.IndexFunc(services, func(s Service) bool { return s.Listen == service4 })
		if got, err := ask(c, "b", patience); err != nil || got[0] != byte('0'+owner) {
			t.Fatalf("%d addresses: %q, %v: want host %d", len(services), got, err, owner)
		}
		k.Service = services[at].Flows()
		if fl, err := sc.f.Flow(k); err != nil || fl.Owner != owner || fl.Epoch != 6 {
			t.Errorf("%d addresses: %+v, %v", len(services), fl, err)
		}
	}
	if services := spec.Tagged([]Service{one, two}); services[0].Tag == 0 || services[1].Tag == 0 || services[0].Tag == services[1].Tag {
		t.Errorf("%+v: want two tags", services)
	}
}

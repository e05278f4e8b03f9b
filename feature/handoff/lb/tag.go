// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// flows is Key.Service of the service's flows at this address.
func (s Service) flows() int { return int(peer.FlowService(uint16(s.ID), uint16(s.Tag))) }

// serviceNumber is the service of a Key.Service.
func serviceNumber(flows int) int { return int(peer.ServiceNumber(uint16(flows))) }

func sameFamily(a, b netip.Addr) bool { return a.Unmap().Is4() == b.Unmap().Is4() }

// tagged gives tags to the addresses of services by flow. A client may have connections from one port to several of them, and
// each is a flow of its own. An address that is alone in its family has tag 0. Other tags depend on the addresses alone, so
// both load balancers of a pair find the same.
func tagged(services []Service) []Service {
	type family struct {
		id int
		v4 bool
	}
	of := map[family][]*Service{}
	for i := range services {
		if s := &services[i]; !s.BySource && s.Proto == unix.IPPROTO_TCP {
			f := family{s.ID, s.Listen.Addr().Unmap().Is4()}
			of[f] = append(of[f], s)
		}
	}
	for _, all := range of {
		if len(all) == 1 {
			continue
		}
		slices.SortFunc(all, func(a, b *Service) int {
			return cmp.Or(a.Listen.Addr().Compare(b.Listen.Addr()), cmp.Compare(a.Listen.Port(), b.Listen.Port()))
		})
		taken := map[int]bool{}
		for _, s := range all {
			h := fnv.New32a()
			_, _ = h.Write([]byte(s.Listen.String())) // it does not fail
			for s.Tag = 1 + int(h.Sum32()%peer.MaxTag); taken[s.Tag]; s.Tag = 1 + s.Tag%peer.MaxTag {
			}
			taken[s.Tag] = true
		}
	}
	return services
}

// retag copies flows of addresses whose tag changes, as it does when another address is added or removed: a flow keeps its owner.
// Call it before the data path knows the new tags.
func (f *DataPath) retag(services []Service) error {
	to := map[int][]Service{} // by the tag until now
	for _, s := range services {
		var v bpf.LBLbService
		k := bpf.LBLbServiceKey{Addr: s.Listen.Addr().As16(), Port: swap(s.Listen.Port()), Proto: s.Proto}
		switch err := f.maps.LbServices.Lookup(k, &v); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
		case err != nil:
			return fmt.Errorf("reading service %s: %w", s.Listen, err)
		case int(v.Id) != s.flows() && serviceNumber(int(v.Id)) == s.ID && v.BySource == 0 && !s.BySource:
			to[int(v.Id)] = append(to[int(v.Id)], s)
		}
	}
	if len(to) == 0 {
		return nil
	}
	type flow struct {
		key   bpf.LBLbFlowKey
		value bpf.LBLbFlow
	}
	var all []flow
	err := f.each(func(k bpf.LBLbFlowKey, v bpf.LBLbFlow) bool {
		for _, s := range to[int(k.Service)] {
			if sameFamily(s.Listen.Addr(), netip.AddrFrom16(k.Client)) {
				c := flow{k, v}
				c.key.Service = uint16(s.flows())
				all = append(all, c)
			}
		}
		return true
	})
	for _, c := range all { // the old ones are forgotten when they are idle
		if e := f.maps.LbFlows.Update(c.key, &c.value, ebpf.UpdateNoExist); e != nil && !errors.Is(e, ebpf.ErrKeyExist) {
			err = errors.Join(err, fmt.Errorf("keeping the owner of a flow: %w", e))
		}
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
)

// retag copies flows of addresses with a changed tag, so they keep their owners. A tag changes when another address of the
// service is added or removed. Call retag before the data path gets the new tags.
func (f *DataPath) retag(services []Service) error {
	to := map[int][]Service{} // by the present tag
	for _, s := range services {
		var v bpf.LBLbService
		k := bpf.LBLbServiceKey{Addr: s.Listen.Addr().As16(), Port: flow.Swap(s.Listen.Port()), Proto: s.Proto}
		switch err := f.maps.LbServices.Lookup(k, &v); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
		case err != nil:
			return fmt.Errorf("read service %s: %w", s.Listen, err)
		case int(v.Id) != s.Flows() && spec.ServiceNumber(int(v.Id)) == s.ID && v.BySource == 0 && !s.BySource:
			to[int(v.Id)] = append(to[int(v.Id)], s)
		}
	}
	if len(to) == 0 {
		return nil
	}
	type copied struct {
		key   bpf.LBLbFlowKey
		value bpf.LBLbFlow
	}
	var all []copied
	err := flow.Each(f.maps.LbFlows, func(k bpf.LBLbFlowKey, v bpf.LBLbFlow) bool {
		for _, s := range to[int(k.Service)] {
			if spec.SameFamily(s.Listen.Addr(), netip.AddrFrom16(k.Client)) {
				c := copied{k, v}
				c.key.Service = uint16(s.Flows())
				all = append(all, c)
			}
		}
		return true
	})
	for _, c := range all { // the old entries are removed when they are idle
		if e := f.maps.LbFlows.Update(c.key, &c.value, ebpf.UpdateNoExist); e != nil && !errors.Is(e, ebpf.ErrKeyExist) {
			err = errors.Join(err, fmt.Errorf("keep the owner of a flow: %w", e))
		}
	}
	return err
}

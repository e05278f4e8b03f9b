// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
)

// Retag copies flows of addresses with a changed tag, so they keep their owners. A tag changes when
// another address of the service is added or removed. Call it before the data path gets the new
// tags. services and flows are the data path's maps.
func Retag(services, flows *ebpf.Map, want []spec.Service) error {
	to := map[int][]spec.Service{} // by the present tag
	for _, s := range want {
		var v bpf.LBLbService
		k := bpf.LBLbServiceKey{Addr: s.Listen.Addr().As16(), Port: Swap(s.Listen.Port()), Proto: s.Proto}
		switch err := services.Lookup(k, &v); {
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
	err := Each(flows, func(k bpf.LBLbFlowKey, v bpf.LBLbFlow) bool {
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
		if e := flows.Update(c.key, &c.value, ebpf.UpdateNoExist); e != nil && !errors.Is(e, ebpf.ErrKeyExist) {
			err = errors.Join(err, fmt.Errorf("keep the owner of a flow: %w", e))
		}
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/kernel"
)

// slack is how much earlier than the data path the agent releases buffered packets. The data path itself would lose their order.
const slack = 500 * time.Millisecond

// resumeMoves continues moves of an earlier agent. Packets of buffered flows wait for the rest of their time. A move without
// further messages times out.
func (a *Agent) resumeMoves() error {
	var open []Key
	err := a.f.Flows(func(k Key, fl Flow) bool {
		if fl.To != 0 || fl.Buffered {
			open = append(open, k)
		}
		return true
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, k := range open {
		fl, err := a.f.Flow(k)
		if err != nil {
			continue // it has ended
		}
		a.f.buffer.Expect(k)
		left := time.Duration(fl.Until-min(fl.Until, kernel.Monotonic())) - slack
		a.timers[k] = a.after(max(0, min(left, a.o.BufferTimeout)), func() { a.expire(k, fl.Epoch) })
		a.o.Log.Info("resuming move", "flow", k.Client, "service", k.Service, "epoch", fl.Epoch, "buffered", fl.Buffered)
	}
	return err
}

// setServices replaces the services of the data path. Flows of removed services stay until they are forgotten.
func (f *DataPath) setServices(services []Service) error {
	if err := flow.Retag(f.maps.LbServices, f.maps.LbFlows, services); err != nil {
		return err
	}
	f.buffer.mu.Lock()
	f.buffer.services = map[listen]Service{}
	f.buffer.mu.Unlock()
	want := map[bpf.LBLbServiceKey]bool{}
	for _, s := range services {
		if err := f.SetService(s); err != nil {
			return err
		}
	}
	for _, s := range services { // again: fragmentsGo depends on all services
		if err := f.SetService(s); err != nil {
			return err
		}
		k := bpf.LBLbServiceKey{Addr: s.Listen.Addr().As16(), Port: flow.Swap(s.Listen.Port()), Proto: s.Proto}
		want[k] = true
		k.Port = 0
		want[k] = true
	}
	var gone []bpf.LBLbServiceKey
	var k bpf.LBLbServiceKey
	var v bpf.LBLbService
	it := f.maps.LbServices.Iterate()
	for it.Next(&k, &v) {
		if !want[k] {
			gone = append(gone, k)
		}
	}
	err := it.Err()
	for _, k := range gone {
		if e := f.maps.LbServices.Delete(k); e != nil && !errors.Is(e, ebpf.ErrKeyNotExist) {
			err = errors.Join(err, fmt.Errorf("remove a service: %w", e))
		}
	}
	return err
}

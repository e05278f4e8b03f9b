// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
)

// Batch is the number of flows per batch lookup.
const Batch = 2048

// Each calls yield with each flow of a table until it returns false. It may skip a flow that ends
// meanwhile, and no other.
func Each(m *ebpf.Map, yield func(bpf.LBLbFlowKey, bpf.LBLbFlow) bool) error {
	keys, values := make([]bpf.LBLbFlowKey, Batch), make([]bpf.LBLbFlow, Batch)
	var at ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&at, keys, values, nil)
		switch last := errors.Is(err, ebpf.ErrKeyNotExist); {
		case errors.Is(err, ebpf.ErrNotSupported): // only the first call fails so
			return EachAlone(m, yield)
		case err != nil && !last:
			return fmt.Errorf("read flows: %w", err)
		default:
			for i := range n {
				if !yield(keys[i], values[i]) {
					return nil
				}
			}
			if last {
				return nil
			}
		}
	}
}

// EachAlone is Each for kernels without batch lookup.
func EachAlone(m *ebpf.Map, yield func(bpf.LBLbFlowKey, bpf.LBLbFlow) bool) error {
	var k bpf.LBLbFlowKey
	var v bpf.LBLbFlow
	it := m.Iterate()
	for it.Next(&k, &v) {
		if !yield(k, v) {
			return nil
		}
	}
	return it.Err()
}

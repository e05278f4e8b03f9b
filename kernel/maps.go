// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"io"
	"reflect"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/weir-project/weir/internal/bounded"
)

// Iterate runs a BPF iterator and returns its output. Socket iterators (Linux 5.9) cover the calling thread's network
// namespace. An error wraps [bounded.ErrStuck] if the user of a socket blocks the iteration.
func Iterate(prog *ebpf.Program) ([]byte, error) {
	it, err := link.AttachIter(link.IterOptions{Program: prog})
	if err != nil {
		return nil, fmt.Errorf("create iterator: %w", err)
	}
	defer it.Close()
	f, err := it.Open()
	if err != nil {
		return nil, fmt.Errorf("open iterator: %w", err)
	}
	// The kernel locks each socket, and its user may hold the lock (package bounded).
	return bounded.Do("the lock of a socket", func() ([]byte, error) {
		defer f.Close()
		return io.ReadAll(f)
	}, nil)
}

// SumPerCPU sums one element of a per-CPU array over all CPUs. The value is a struct of uint64 counters. The sum is a
// single reading: a concurrent increment is included or not, never in part.
func SumPerCPU[T any](m *ebpf.Map, key uint32) (T, error) {
	var sum T
	var shares []T
	if err := m.Lookup(key, &shares); err != nil {
		return sum, fmt.Errorf("read counters %d: %w", key, err)
	}
	total := reflect.ValueOf(&sum).Elem()
	for _, s := range shares {
		share := reflect.ValueOf(s)
		for i := range total.NumField() {
			if f := total.Field(i); f.Kind() == reflect.Uint64 && f.CanSet() {
				f.SetUint(f.Uint() + share.Field(i).Uint())
			}
		}
	}
	return sum, nil
}

// ZeroPerCPU clears one element of a per-CPU array. A slot reused for another service must not show old counts.
func ZeroPerCPU[T any](m *ebpf.Map, key uint32) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	return m.Put(key, make([]T, cpus))
}

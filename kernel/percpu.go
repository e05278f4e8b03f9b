// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"reflect"

	"github.com/cilium/ebpf"
)

// SumPerCPU reads one element of a per-CPU array whose values are structs of
// uint64 counters and adds up the CPUs' shares. The sum is of one reading: a
// CPU that counts meanwhile is seen or not, but never half.
func SumPerCPU[T any](m *ebpf.Map, key uint32) (T, error) {
	var sum T
	var shares []T
	if err := m.Lookup(key, &shares); err != nil {
		return sum, fmt.Errorf("reading counters %d: %w", key, err)
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

// ZeroPerCPU clears one element of a per-CPU array: a slot that is given to
// another service must not show the former's counts.
func ZeroPerCPU[T any](m *ebpf.Map, key uint32) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	return m.Put(key, make([]T, cpus))
}

// SPDX-License-Identifier: Apache-2.0

package table

import (
	"time"

	"github.com/cilium/ebpf"
)

// waitByMap waits for running programs by replacing a map in a map of maps.
func waitByMap() {
	inner := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	in, err := ebpf.NewMap(inner)
	if err == nil {
		defer in.Close()
		var outer *ebpf.Map
		if outer, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: inner}); err == nil {
			defer outer.Close()
			err = outer.Put(uint32(0), in)
		}
	}
	if err != nil {
		time.Sleep(time.Second) // no program runs for so long
	}
}

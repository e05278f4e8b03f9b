// SPDX-License-Identifier: Apache-2.0

// Package rcu waits for the ends of running BPF programs.
package rcu

import (
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Wait returns once every program running at the call has ended. membarrier(2) with MEMBARRIER_CMD_GLOBAL is
// synchronize_rcu() in the kernel. If the kernel refuses it (nohz_full), an update of a map of maps waits for the same
// (maybe_wait_bpf_programs in kernel/bpf/syscall.c).
func Wait() {
	const global = 1
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0); errno == 0 {
		return
	}
	waitByMap()
}

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
		time.Sleep(time.Second) // no program runs that long
	}
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// AttachedProgram is a program at a hook, weir's or foreign.
type AttachedProgram struct {
	ID   uint32
	Name string // at most 15 bytes; empty if unreadable
}

// LookupPrograms lists the sk_lookup programs of the namespace of fd, in the order of execution. All of them run. The
// last program to choose a socket decides. A drop takes effect only if no program chooses a socket.
func LookupPrograms(fd int) ([]AttachedProgram, error) {
	q, err := link.QueryPrograms(link.QueryOptions{Target: fd, Attach: ebpf.AttachSkLookup})
	if err != nil {
		return nil, fmt.Errorf("list sk_lookup programs: %w", err)
	}
	var out []AttachedProgram
	for _, p := range q.Programs {
		a := AttachedProgram{ID: uint32(p.ID)}
		if prog, err := ebpf.NewProgramFromID(p.ID); err == nil {
			if info, err := prog.Info(); err == nil {
				a.Name = info.Name
			}
			prog.Close()
		}
		out = append(out, a)
	}
	return out, nil
}

// WaitForPrograms returns once every BPF program running at the call has ended, within about 20 ms. A replaced program
// still runs for packets that met it before. membarrier(2) with MEMBARRIER_CMD_GLOBAL is synchronize_rcu() in the
// kernel. If the kernel refuses it (nohz_full), an update of a map of maps waits for the same (maybe_wait_bpf_programs
// in kernel/bpf/syscall.c).
func WaitForPrograms() {
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

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/kernel/internal/rcu"
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
// still runs for packets that met it before.
func WaitForPrograms() { rcu.Wait() }

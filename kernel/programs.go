// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// AttachedProgram is a program that runs at a hook, whoever attached it.
type AttachedProgram struct {
	ID   uint32
	Name string // at most 15 bytes; empty where it cannot be seen
}

// LookupPrograms lists the programs at the sk_lookup hook of the namespace that
// fd is open on, in the order in which they run. All of them run; the last one
// that chooses a socket decides, and one that drops only if none chooses.
func LookupPrograms(fd int) ([]AttachedProgram, error) {
	q, err := link.QueryPrograms(link.QueryOptions{Target: fd, Attach: ebpf.AttachSkLookup})
	if err != nil {
		return nil, fmt.Errorf("listing sk_lookup programs: %w", err)
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

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/internal/bounded"
)

// Iterate runs an iterator program over what it is for, and returns what it
// wrote. Sockets are those of the calling thread's network namespace; since
// Linux 5.9. An error that wraps [bounded.ErrStuck] says that a user keeps a socket from being asked.
func Iterate(prog *ebpf.Program) ([]byte, error) {
	it, err := link.AttachIter(link.IterOptions{Program: prog})
	if err != nil {
		return nil, fmt.Errorf("making an iterator: %w", err)
	}
	defer it.Close()
	f, err := it.Open()
	if err != nil {
		return nil, fmt.Errorf("reading an iterator: %w", err)
	}
	// The kernel locks each socket, and its owner may hold the lock (package bounded).
	return bounded.Do("the lock of a socket", func() ([]byte, error) {
		defer f.Close()
		return io.ReadAll(f)
	}, nil)
}

// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/internal/sockfilter"
)

// SocketFilter is the filter of one socket; see [sockfilter.Filter].
type SocketFilter struct {
	FD   int
	Name string // name for errors: "udp 0.0.0.0:53"

	filter sockfilter.Filter
}

// Attach makes the socket run prog, a socket filter. A second call replaces the program.
func (s *SocketFilter) Attach(prog *ebpf.Program) error {
	s.filter.FD, s.filter.Name = s.FD, s.Name
	return s.filter.Attach(prog.FD())
}

// Detach removes the filter set by Attach. A missing filter is not an error.
func (s *SocketFilter) Detach() error {
	s.filter.FD = s.FD
	return s.filter.Detach()
}

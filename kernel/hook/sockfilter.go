// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/internal/sockfilter"
)

// SocketFilter is the filter of one socket, as [sockfilter.Filter] says.
type SocketFilter struct {
	FD   int
	Name string // what it is, for errors: "udp 0.0.0.0:53"

	filter sockfilter.Filter
}

// Attach makes the socket run prog, of type socket filter; again, to exchange the program.
func (s *SocketFilter) Attach(prog *ebpf.Program) error {
	s.filter.FD, s.filter.Name = s.FD, s.Name
	return s.filter.Attach(prog.FD())
}

// Detach takes away what Attach put there. A filter that is gone is no error.
func (s *SocketFilter) Detach() error {
	s.filter.FD = s.FD
	return s.filter.Detach()
}

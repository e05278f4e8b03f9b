// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/internal/sockfilter"
)

// SocketFilter is the filter of one socket.
type SocketFilter struct{ sockfilter.Filter }

// Attach makes the socket run prog, as [sockfilter.Filter.Attach] says.
func (s *SocketFilter) Attach(prog *ebpf.Program) error { return s.Filter.Attach(prog.FD()) }

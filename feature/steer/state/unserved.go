// SPDX-License-Identifier: Apache-2.0

package state

import (
	"fmt"

	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/kernel"
)

// Unserved is a service with bindings and without a socket. Its traffic is rejected.
type Unserved struct {
	Service  string `json:"service"`
	Bindings int    `json:"bindings"`
	Rejected uint64 `json:"rejected"`
}

// Text describes the fate of the service's traffic.
func (u Unserved) Text(netns string) string {
	return fmt.Sprintf("no socket is registered in %s for its %s: the traffic is rejected (%d so far)", netns, counted(u.Bindings, "binding"), u.Rejected)
}

// Remedy tells how to register a socket.
func (u Unserved) Remedy() string {
	return fmt.Sprintf("weir steer register %s tcp|udp ADDRESS PORT --pid N, at each start of the server (docs/BINDINGS.md)", u.Service)
}

func counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// NoteUnserved lists the services without a socket in each namespace.
func (s *State) NoteUnserved(r *kernel.Root) error {
	for i := range s.Bound {
		b := &s.Bound[i]
		all, err := bindings.Registered(r, b.Scope, false)
		if err != nil {
			return err
		}
		b.Unserved = nil
		for _, n := range all {
			if n.Bindings > 0 && !n.Configured && len(n.Sockets) == 0 {
				b.Unserved = append(b.Unserved, Unserved{n.Service, n.Bindings, n.Rejected})
			}
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package front

import (
	"fmt"

	"github.com/weir-project/weir/feature/handoff/peer"
)

// admits says whether a host's agent may connect: it is one of the options', or may register under a name and a number that are
// nobody else's. The caller holds mu.
func (a *Agent) admits(h peer.Hello) error {
	if h.Role != peer.HostAgent || h.Number == 0 || h.Number > MostHosts {
		return fmt.Errorf("it is no host's, or has no number from 1 to %d", MostHosts)
	}
	if name, ok := a.names[h.Number]; ok {
		if name != h.Name {
			return fmt.Errorf("host %d is %s", h.Number, name)
		}
		return nil
	}
	if !a.o.Manage || !a.o.Register {
		return fmt.Errorf("it is none of the hosts of this front end")
	}
	for number, name := range a.names {
		if name == h.Name {
			return fmt.Errorf("host %s has number %d", name, number)
		}
	}
	if m := a.members[h.Number]; m != nil && m.Name != h.Name {
		return fmt.Errorf("number %d is host %s's: take another one", h.Number, m.Name)
	}
	for _, m := range a.members {
		if m.Name == h.Name && m.Number != h.Number {
			return fmt.Errorf("host %s has number %d: a host keeps its number", m.Name, m.Number)
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package front

import (
	"maps"

	"github.com/weir-project/weir/feature/handoff/move"
)

// LoadKey is a service at a host.
type LoadKey struct {
	Host    move.Host
	Service uint16
}

// Loads is what waits at the hosts, as they say, in the services' own units.
func (a *Agent) Loads() map[LoadKey]uint32 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.loads)
}

func (a *Agent) noteLoad(host move.Host, service uint16, n uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.loads[LoadKey{host, service}] = n
}

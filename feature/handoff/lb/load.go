// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"math"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

type loadKey struct {
	backend move.Backend
	service uint16
}

// nobody is the load reported for a service without members.
const nobody = math.MaxUint32

func (a *Agent) noteLoad(from *peer.Conn, service uint16, n uint32) {
	service = peer.ServiceNumber(service)
	a.mu.Lock()
	defer a.mu.Unlock()
	backend := from.Peer.Number
	if a.backends[backend] != from {
		return // of a replaced connection
	}
	if n == nobody {
		delete(a.loads, loadKey{backend, service})
		return
	}
	a.loads[loadKey{backend, service}] = n
}

// waitingLoads returns the load of a backend by service name. The caller holds mu.
func (a *Agent) waitingLoads(backend move.Backend) map[string]uint32 {
	var out map[string]uint32
	for k, n := range a.loads {
		if k.backend != backend {
			continue
		}
		name := fmt.Sprint(k.service)
		for _, s := range a.o.Services {
			if s.ID == int(k.service) {
				name = s.Name
			}
		}
		if out == nil {
			out = map[string]uint32{}
		}
		out[name] = n
	}
	return out
}

// unload forgets a backend's loads. The caller holds mu.
func (a *Agent) unload(backend move.Backend) {
	for k := range a.loads {
		if k.backend == backend {
			delete(a.loads, k)
		}
	}
}

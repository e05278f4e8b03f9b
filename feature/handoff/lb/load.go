// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"math"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// loadKey is a service at a host.
type loadKey struct {
	host    move.Host
	service uint16
}

// nobody is what a host says waits for a service whose members have gone.
const nobody = math.MaxUint32

func (a *Agent) noteLoad(from *peer.Conn, service uint16, n uint32) {
	service = peer.ServiceNumber(service)
	a.mu.Lock()
	defer a.mu.Unlock()
	host := from.Peer.Number
	if a.hosts[host] != from {
		return // of a connection that another one has replaced
	}
	if n == nobody {
		delete(a.loads, loadKey{host, service})
		return
	}
	a.loads[loadKey{host, service}] = n
}

// loadsOf is what waits at a host, by service. The caller holds mu.
func (a *Agent) loadsOf(host move.Host) map[string]uint32 {
	var out map[string]uint32
	for k, n := range a.loads {
		if k.host != host {
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

// unload forgets what a host has said. The caller holds mu.
func (a *Agent) unload(host move.Host) {
	for k := range a.loads {
		if k.host == host {
			delete(a.loads, k)
		}
	}
}

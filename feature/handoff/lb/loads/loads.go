// SPDX-License-Identifier: Apache-2.0

// Package loads has the latest loads of services, as reported by the agents of backends.
package loads

import (
	"fmt"
	"maps"
	"math"

	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

type key struct {
	backend move.Backend
	service uint16
}

// Nobody is the load reported for a service without members.
const Nobody = math.MaxUint32

// Loads are loads in the unit of each service. They are not safe for concurrent use.
type Loads struct{ of map[key]uint32 }

// Note notes a load. service is as in a frame: a number with a tag.
func (l *Loads) Note(backend move.Backend, service uint16, n uint32) {
	k := key{backend, peer.ServiceNumber(service)}
	if n == Nobody {
		delete(l.of, k)
		return
	}
	if l.of == nil {
		l.of = map[key]uint32{}
	}
	l.of[k] = n
}

// Of returns the loads of a backend by the service's name, nil for none.
func (l *Loads) Of(backend move.Backend, services []spec.Service) map[string]uint32 {
	var out map[string]uint32
	for k, n := range l.of {
		if k.backend != backend {
			continue
		}
		name := fmt.Sprint(k.service)
		for _, s := range services {
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

// Forget forgets a backend's loads.
func (l *Loads) Forget(backend move.Backend) {
	maps.DeleteFunc(l.of, func(k key, _ uint32) bool { return k.backend == backend })
}

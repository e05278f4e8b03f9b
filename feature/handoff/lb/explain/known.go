// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature/handoff/move"
)

// Known is a load balancer's state from its agent and the applied configuration.
type Known struct {
	Agent    bool // it answers
	Backends []Backend
	Services map[int]string          // names in the file, by number
	Names    map[move.Backend]string // names of backends in the file
}

// Backend is a backend as reported by the agent.
type Backend struct {
	Number move.Backend
	Name   string
	Weight int
	Up     bool
	Reason string // why it is not up, or gets no new flows
}

func (k *Known) serviceName(number int) string {
	if name := k.Services[number]; name != "" {
		return "service " + name
	}
	return fmt.Sprintf("service number %d", number)
}

func (k *Known) backendName(number move.Backend) string {
	if name := cmp.Or(k.backend(number).Name, k.Names[number]); name != "" {
		return fmt.Sprintf("backend %s (number %d)", name, number)
	}
	return fmt.Sprintf("backend number %d", number)
}

// backend returns the agent's report of a backend. A backend unknown to the agent counts as up.
func (k *Known) backend(number move.Backend) Backend {
	i := slices.IndexFunc(k.Backends, func(b Backend) bool { return b.Number == number })
	if i < 0 {
		return Backend{Number: number, Up: true}
	}
	return k.Backends[i]
}

// unwell returns why a backend is not well, as reported by the agent. It is empty for a well or
// unknown backend.
func (k *Known) unwell(number move.Backend) string {
	if b := k.backend(number); k.Agent && !b.Up {
		return cmp.Or(b.Reason, "see weir lb status")
	}
	return ""
}

// noBackend returns why no backend gets new flows, as reported by the agent.
func (k *Known) noBackend() string {
	if !k.Agent {
		return ": its agent does not answer: run weir serve"
	}
	if len(k.Backends) == 0 {
		return ": there are no backends"
	}
	var each []string
	for _, b := range k.Backends {
		reason := cmp.Or(b.Reason, "it does not serve this service")
		if b.Reason == "" && b.Weight == 0 {
			reason = "its weight is 0"
		}
		each = append(each, fmt.Sprintf("%s: %s", k.backendName(b.Number), reason))
	}
	return ": " + strings.Join(each, "; ")
}

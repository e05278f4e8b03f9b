// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"fmt"
	"strings"
)

// isisShown is the number of characters of a hostname in isisd's LSP headers.
const isisShown = 14

// begin starts an LSP or a further fragment. If several hostnames match the truncated header, the LSP's own Hostname
// decides. Pseudonodes and further fragments have none; they follow their router's LSP.
func (r *isisReader) begin(s *isisSystem, pseudonode, fragment string) error {
	r.now, r.edge = s, nil
	id, known := r.ids[s.shown]
	if len(s.shown) >= isisShown {
		var fit []string
		for name, id := range r.ids {
			if strings.HasPrefix(name, s.shown) {
				fit = append(fit, id)
			}
		}
		if known = len(fit) == 1; known {
			id = fit[0]
		} else if len(fit) > 1 {
			if pseudonode+fragment == "0000" {
				return nil // Hostname follows
			}
			id, known = r.latest[s.shown]
		}
	}
	if !known {
		id = strings.ToLower(s.shown)
	}
	if len(id) != 14 || strings.Count(id, ".") != 2 {
		return fmt.Errorf("the system id of %s is unknown: use the output of %s", s.shown, ISISCommand)
	}
	r.register(s, id, pseudonode)
	return nil
}

// register stores an LSP, merged with its fragments, under its id.
func (r *isisReader) register(s *isisSystem, id, pseudonode string) {
	r.latest[s.shown] = id
	if s.self {
		r.self = id + ".00"
	}
	if s.id = id + "." + pseudonode; r.systems[s.id] == nil {
		r.systems[s.id] = s
		r.order = append(r.order, s.id)
		return
	}
	r.now = r.systems[s.id]
	r.now.overload = r.now.overload || s.overload
}

// known checks at the end of an LSP that its system is known.
func (r *isisReader) known() error {
	if r.now != nil && r.now.id == "" {
		return fmt.Errorf("several hostnames begin with %s, so the router of this LSP is unknown: use the output of %s", r.now.shown, ISISCommand)
	}
	return nil
}

// systemID returns the system id of a name, or the name itself.
func (r *isisReader) systemID(name string) string {
	if id, ok := r.ids[name]; ok {
		return id
	}
	return strings.ToLower(name)
}

// name returns the hostname of a system, or its id.
func (r *isisReader) name(id string) string {
	id = strings.TrimSuffix(id, ".00")
	if name, ok := r.hostnames[id]; ok && checkName("", name) == nil { // a neighbour chooses its hostname freely
		return name
	}
	return id
}

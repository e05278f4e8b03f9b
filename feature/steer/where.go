// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"net/netip"
)

// Place says where the traffic of one source goes.
type Place struct {
	Address  netip.Addr `json:"address"`
	Bucket   int        `json:"bucket"`
	Slot     int        `json:"slot"`
	Admitted bool       `json:"admitted"` // false: on_empty decides
	PID      int        `json:"pid,omitempty"`
	Member   string     `json:"member,omitempty"`
	Instead  *int       `json:"instead,omitempty"` // on_empty next: the slot that takes it meanwhile
}

// WhatIf changes what Where computes with; its zero value is what is there.
type WhatIf struct {
	Slots   int   // this many slots instead; 0: as they are
	Without []int // slots to take as empty
}

// Where computes the place of each source address, as the program does.
func (s *ServiceState) Where(w WhatIf, addrs ...netip.Addr) ([]Place, error) {
	table := s.table
	slots := len(s.Slots)
	if len(table) == 0 {
		return nil, fmt.Errorf("service %s: %s", s.Name, s.Problem)
	}
	if w.Slots != 0 {
		if w.Slots < 1 || w.Slots > MaxSlots {
			return nil, fmt.Errorf("%d slots: want a number from 1 to %d", w.Slots, MaxSlots)
		}
		table, slots = Rebalance(table, w.Slots), w.Slots
	}
	whole := make([]bool, slots)
	for i := range whole {
		whole[i] = i >= len(s.Slots) || s.Slots[i].Admitted() // a simulated slot is taken to be served
	}
	for _, n := range w.Without {
		if n < 0 || n >= slots {
			return nil, fmt.Errorf("slot %d: there are slots 0 to %d", n, slots-1)
		}
		whole[n] = false
	}
	var out []Place
	for _, a := range addrs {
		hash := Hash(s.Seed, a)
		b := int(hash & (Buckets - 1))
		p := Place{Address: a, Bucket: b, Slot: int(table[b])}
		p.Admitted = whole[p.Slot]
		takes := p.Slot
		if !p.Admitted && s.OnEmpty == Next {
			if at, ok := divert(whole, p.Slot, hash); ok {
				p.Instead, takes = &at, at
			}
		}
		if takes < len(s.Slots) && whole[takes] {
			p.PID, p.Member = s.Slots[takes].PID, s.Slots[takes].Member
		}
		out = append(out, p)
	}
	return out, nil
}

// maxNext is STEER_MAX_NEXT.
const maxNext = 32

// divert is the twin of the program's function of that name.
func divert(whole []bool, slot int, hash uint32) (int, bool) {
	n := len(whole)
	step := 1
	if n > 1 {
		step = 1 + int(hash>>12)%(n-1)
	}
	at := slot
	for i := range min(maxNext, n-1) {
		if i > 0 {
			step = 1
		}
		at = (at + step) % n
		if at == slot {
			at = (at + 1) % n
		}
		if whole[at] {
			return at, true
		}
	}
	return 0, false
}

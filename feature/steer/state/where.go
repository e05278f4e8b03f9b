// SPDX-License-Identifier: Apache-2.0

package state

import (
	"fmt"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature/steer/spec"
)

// Values returns the parameters of the query "where".
func (w WhatIf) Values(service string, sources []string) url.Values {
	without := make([]string, len(w.Without))
	for i, n := range w.Without {
		without[i] = strconv.Itoa(n)
	}
	return url.Values{"service": {service}, "slots": {strconv.Itoa(w.Slots)}, "without": {strings.Join(without, ",")}, "address": sources}
}

// Parse reads the parameters of a query.
func (w *WhatIf) Parse(q url.Values) (err error) {
	if s := q.Get("slots"); s != "" {
		if w.Slots, err = strconv.Atoi(s); err != nil {
			return fmt.Errorf("slots %q: want a whole number", s)
		}
	}
	for _, s := range strings.FieldsFunc(q.Get("without"), func(c rune) bool { return c == ',' }) {
		n, err := strconv.Atoi(s)
		if err != nil {
			return fmt.Errorf("without %q: want whole numbers, like 1,2", s)
		}
		w.Without = append(w.Without, n)
	}
	return nil
}

// Assignment is the slot of a source's traffic.
type Assignment struct {
	Address  netip.Addr `json:"address"`
	Device   string     `json:"device,omitempty"` // device name, by: device
	Bucket   int        `json:"bucket"`
	Slot     int        `json:"slot"`
	Admitted bool       `json:"admitted"` // false: on_empty decides
	PID      int        `json:"pid,omitempty"`
	Member   string     `json:"member,omitempty"`
	Instead  *int       `json:"instead,omitempty"` // on_empty next: the slot that receives it meanwhile
	Moved    bool       `json:"moved,omitempty"`   // by weir steer move
}

// WhatIf modifies the computation of Where. The zero value is the current state.
type WhatIf struct {
	Slots   int   // simulated number of slots; 0: unchanged
	Without []int // slots to treat as empty
}

// Sources parses addresses and device names. A name becomes the device's first address.
func (s *Service) Sources(names []string) ([]netip.Addr, error) {
	out := make([]netip.Addr, len(names))
	for i, name := range names {
		if a, err := netip.ParseAddr(name); err == nil {
			out[i] = a.WithZone("")
			continue
		}
		d := s.DeviceList.Named(name)
		switch {
		case d != nil:
			out[i] = d.Stands()
		case s.By != spec.ByDevice:
			return nil, fmt.Errorf("%q is not an IP address, and service %s has no device names: they need by: device", name, s.Name)
		default:
			return nil, fmt.Errorf("%q is not an IP address, and no device in %s has this name", name, s.DevicesFile)
		}
	}
	return out, nil
}

// Where computes the slot of each source address like the program. It returns an error if the policy does not decide by
// the source alone.
func (s *Service) Where(w WhatIf, addrs ...netip.Addr) ([]Assignment, error) {
	switch {
	case len(s.Table) == 0:
		return nil, fmt.Errorf("service %s: %s", s.Name, s.Problem)
	case s.By == spec.ByPacket:
		return nil, fmt.Errorf("service %s is by: packet: each CPU distributes its packets in turn, regardless of their source", s.Name)
	case s.By == spec.ByCPU:
		return nil, fmt.Errorf("service %s is by: cpu: the slot is the number of the receiving CPU modulo %d", s.Name, len(s.Slots))
	case s.By == spec.ByFlow, s.By == spec.ByQUIC:
		return nil, fmt.Errorf("service %s is by: %s: addresses and ports decide: weir explain udp 192.0.2.7:2055 10.0.0.1:4739 explains one flow", s.Name, s.By)
	}
	m, err := s.Mapping(w)
	if err != nil {
		return nil, err
	}
	var out []Assignment
	for _, a := range addrs {
		p := m.Assign(a)
		takes := p.Slot
		if p.Instead != nil {
			takes = *p.Instead
		}
		if takes < len(s.Slots) && m.whole[takes] {
			p.PID, p.Member = s.Slots[takes].PID, s.Slots[takes].Member
		}
		out = append(out, p)
	}
	return out, nil
}

// Mapping computes slots like the program, for policies that keep a device in one slot.
type Mapping struct {
	seed    uint32
	Table   []uint16
	moved   map[netip.Addr]int
	Devices *spec.DeviceList
	whole   []bool // by slot: has a complete member
	onEmpty spec.OnEmpty
}

// Mapping returns the mapping under a hypothetical change. An error explains why slots cannot be computed.
func (s *Service) Mapping(w WhatIf) (*Mapping, error) {
	m := &Mapping{seed: s.Seed, Table: s.Table, onEmpty: s.OnEmpty, Devices: s.DeviceList}
	slots := len(s.Slots)
	if s.Record != nil {
		m.moved = s.Record.Moves()
	}
	if w.Slots != 0 {
		if w.Slots < 1 || w.Slots > spec.MaxSlots {
			return nil, fmt.Errorf("%d slots: want a number from 1 to %d", w.Slots, spec.MaxSlots)
		}
		if slots = w.Slots; s.Record != nil {
			p := *s.Record
			p.Service.Slots = w.Slots
			p.Shape(s.Record)
			m.Table, m.moved = p.Table, p.Moves()
		} else {
			m.Table = spec.Rebalance(m.Table, slots)
		}
	}
	m.whole = make([]bool, slots)
	for i := range m.whole {
		m.whole[i] = i >= len(s.Slots) || s.Slots[i].Admitted() // simulated slots count as served
	}
	for _, n := range w.Without {
		if n < 0 || n >= slots {
			return nil, fmt.Errorf("slot %d: there are slots 0 to %d", n, slots-1)
		}
		m.whole[n] = false
	}
	return m, nil
}

// Assign computes an assignment without its member.
func (m *Mapping) Assign(a netip.Addr) Assignment {
	p := Assignment{Address: a}
	if d := m.Devices.Find(a); d != nil {
		p.Device = d.Name
	}
	stands := m.Devices.Stands(a)
	hash := spec.Hash(m.seed, stands)
	p.Bucket = int(hash & (spec.Buckets - 1))
	p.Slot = int(m.Table[p.Bucket])
	if slot, ok := m.moved[stands]; ok {
		p.Slot, p.Moved = slot, true
	}
	p.Admitted = m.whole[p.Slot]
	if !p.Admitted && m.onEmpty == spec.Next {
		if at, ok := Divert(m.whole, p.Slot, hash); ok {
			p.Instead = &at
		}
	}
	return p
}

// maxNext is STEER_MAX_NEXT.
const maxNext = 32

// Divert is the counterpart of the program's function divert.
func Divert(whole []bool, slot int, hash uint32) (int, bool) {
	others := len(whole) - 1
	if others < 1 {
		return 0, false
	}
	start := int(hash>>12) % others
	for i := range min(maxNext, others) {
		if at := (slot + 1 + (start+i)%others) % len(whole); whole[at] {
			return at, true
		}
	}
	return 0, false
}

// HashFlow returns the hash of a packet under by: flow, like the program's hash_flow. The seed of the destination's
// hash is the source's [spec.Hash], plus the ports (the remote one in network byte order), plus 1 for TCP. An IPv4
// destination is the first four of 16 bytes.
func HashFlow(seed uint32, proto uint8, from, to netip.AddrPort) uint32 {
	var tcp uint32
	if proto == 6 {
		tcp = 1
	}
	port := uint32(spec.NetworkOrder(from.Port()))
	dst := to.Addr().Unmap()
	if dst.Is4() {
		var b [16]byte
		copy(b[:], dst.AsSlice())
		dst = netip.AddrFrom16(b)
	}
	return spec.Hash(spec.Hash(seed, from.Addr())+(port<<16|uint32(to.Port()))+tcp, dst)
}

// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/locate"
	"github.com/weir-project/weir/feature/handoff/move"
)

// The data path knows a backend by its place: what comes from there is the backend's. So a place is one backend's alone, whatever
// addresses lead to it.

// found says whether it is known where a backend is, and the place is its own.
func (m *member) found() bool { return !m.placed.IsZero() && m.rival == "" }

// contest refuses places to members, if others have them. The caller holds mu.
func (a *Agent) contest() {
	at := map[locate.Place][]*member{}
	for _, m := range a.members {
		if !m.placed.IsZero() {
			at[m.location.Place()] = append(at[m.location.Place()], m)
		}
	}
	for place, all := range at {
		owner := all[0]
		if len(all) > 1 {
			before := a.f.ownerOf(place)
			owner = slices.MinFunc(all, func(m, o *member) int { return m.compare(o, before) })
		}
		for _, m := range all {
			rival := ""
			if m != owner {
				rival = owner.Name
			}
			if rival != m.rival && rival != "" {
				a.o.Log.Warn("a backend is at the place of another one", "name", m.Name, "address", m.Address, "place", place, "backend", rival)
			}
			m.rival = rival
		}
	}
}

// compare sorts members by their right to a place: those of the file, the one that the data path knows there, then by time.
func (m *member) compare(o *member, before move.Backend) int {
	first := func(yes, other bool) int {
		switch {
		case yes == other:
			return 0
		case yes:
			return -1
		}
		return 1
	}
	named := func(m *member) bool { return m.told != nil && m.told.Address.IsValid() }
	return cmp.Or(first(named(m), named(o)), first(m.Number == before, o.Number == before), m.since.Compare(o.since), cmp.Compare(m.Number, o.Number))
}

// ownerOf is the backend that the data path knows at a place; 0: none.
func (f *DataPath) ownerOf(p locate.Place) move.Backend {
	var number uint32
	if p.Tunnel.IsValid() {
		_ = f.maps.LbTunnels.Lookup(bpf.LBLbTunnelKey{Addr: p.Tunnel.As16()}, &number) // without an entry it stays 0
	} else {
		_ = f.maps.LbMacs.Lookup(bpf.LBLbMacKey{Ifindex: uint32(p.Interface), Mac: p.MAC}, &number)
	}
	return move.Backend(number)
}

// place is where a backend is, for the data path.
func (h Backend) place() locate.Place {
	return locate.Location{Interface: h.Interface, MAC: h.MAC, Tunnel: h.Tunnel}.Place()
}

// checkPlaces says which backends are at one place.
func checkPlaces(backends []Backend) (errs []error) {
	at := map[locate.Place]string{}
	for _, h := range backends {
		if o, taken := at[h.place()]; taken {
			errs = append(errs, fmt.Errorf("backend %s: it is at %s, as backend %s is: each has a place of its own", h.Name, h.place(), o))
		}
		at[h.place()] = h.Name
	}
	return errs
}

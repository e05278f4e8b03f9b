// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"net/netip"

	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/routers"
)

// unknown is the slot of a device without an answer from weir: the control run has no slots.
const unknown = -1

// account holds the collectors' counts of one device.
type account struct {
	addr    netip.Addr
	slot    int    // current slot, named by weir
	homes   []home // its slots after moves, oldest first; empty if it never moved
	real    bool   // a real router: its number of sent records is unknown
	at      map[presence]bool
	total   map[routers.Protocol]int
	counted map[routers.Protocol]map[uint32]int // by epoch, at a right collector
	decoded map[decoding]int                    // IPFIX records at a right collector, in detail
	session int                                 // newest BMP session with a Peer Up in the log of the right collector
	before  int                                 // session of the device before its last move; 0: it never moved
	peerUps int
	life    int // of the right collector, at its last counted IPFIX record; 0: none since the move
}

// home is the slot of a device from an epoch on.
type home struct {
	from uint32
	slot int
	old  int // during the epoch of a move: the previous slot; else unknown
}

// presence is a collector with records of a device during a home, by the home's index.
type presence struct{ home, collector int }

// decoding identifies decoded records: the collector, its life, and the epoch.
type decoding struct {
	collector, life int
	epoch           uint32
}

func newAccount(a netip.Addr, real bool) *account {
	return &account{addr: a, slot: unknown, real: real, at: map[presence]bool{}, total: map[routers.Protocol]int{}, decoded: map[decoding]int{},
		counted: map[routers.Protocol]map[uint32]int{routers.IPFIX: {}, routers.BMP: {}}}
}

// latest is the epoch of records without an epoch.
const latest = ^uint32(0)

// recordEpoch returns the epoch of a record, or latest for a record without one.
func (a *account) recordEpoch(r peers.Record) uint32 {
	if a.real || r.Kind != peers.Flows && r.Kind != peers.Route {
		return latest
	}
	return r.Epoch
}

// home returns the device's home in an epoch, and its index.
func (a *account) home(epoch uint32) (home, int) {
	for i := len(a.homes) - 1; i >= 0; i-- {
		if a.homes[i].from <= epoch {
			return a.homes[i], i
		}
	}
	return home{slot: a.slot, old: unknown}, 0
}

// moving reports whether the device may be at two collectors now.
func (a *account) moving() bool {
	h, _ := a.home(latest)
	return h.old != unknown
}

// welcome reports whether a record of the device may be at this collector, and returns the index of the
// device's home at this time.
//
// In the epoch of a move, earlier records belong to the old collector and later ones to the new. A session
// younger than the move belongs to the new one only. A message without an epoch may be read a little after
// the end of the move.
func (a *account) welcome(collector int, r peers.Record) (bool, int) {
	h, i := a.home(a.recordEpoch(r))
	switch {
	case h.slot == unknown || h.slot == collector:
		return true, i
	case r.Kind == peers.PeerUp:
		return h.old == collector && routers.SessionOfPort(r.Port) <= a.before, i
	case r.Kind == peers.Other && i > 0 && a.homes[i-1].old == collector:
		return true, i - 1
	}
	return h.old == collector, i
}

// move gives the device another slot from an epoch on. In this epoch it may be at both. endMove ends this.
func (a *account) move(epoch uint32, to, session int) {
	if len(a.homes) == 0 {
		a.homes = append(a.homes, home{0, a.slot, unknown})
	}
	a.homes = append(a.homes, home{epoch, to, a.slot})
	a.slot, a.before, a.life = to, session, 0
}

// endMove ends a move: from the epoch on the device is at one collector again.
func (a *account) endMove(epoch uint32) {
	if a.moving() {
		a.homes = append(a.homes, home{epoch, a.slot, unknown})
	}
}

// split reports whether more than one collector has records of the device during one home.
func (a *account) split() bool {
	seen := map[int]int{}
	for p := range a.at {
		if p.home < len(a.homes) && a.homes[p.home].old != unknown {
			continue // it moved; any third collector counts as misdirected
		}
		if seen[p.home]++; seen[p.home] > 1 {
			return true
		}
	}
	return false
}

// collectors returns all collectors with records of the device.
func (a *account) collectors() map[int]bool {
	all := map[int]bool{}
	for p := range a.at {
		all[p.collector] = true
	}
	return all
}

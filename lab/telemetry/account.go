// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"net/netip"

	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/routers"
)

// unknown is the slot of a device about which nobody was asked: the control run has no slots.
const unknown = -1

// account is what the collectors counted of one device.
type account struct {
	addr    netip.Addr
	slot    int    // that weir names for it now
	homes   []home // the slots it had, if it ever moved; oldest first
	real    bool   // a real router: what it sent is not known, only that it did
	at      map[presence]bool
	total   map[routers.Protocol]int
	counted map[routers.Protocol]map[uint32]int // by epoch, at a right collector
	decoded map[decoding]int                    // IPFIX records at a right collector, in detail
	session int                                 // newest BMP session whose Peer Up the right collector logged
	before  int                                 // the session that the device held before it moved last; 0: it never did
	peerUps int
	life    int // of the right collector, which last counted an IPFIX record; 0: none did since it moved
}

// home is the slot where a device belongs from an epoch on.
type home struct {
	from uint32
	slot int
	old  int // in the epoch in which it moves: the slot that it leaves; else unknown
}

// presence is a collector that heard of a device while it had a home, by the home's index.
type presence struct{ home, collector int }

// decoding tells where and when records were decoded.
type decoding struct {
	collector, life int
	epoch           uint32
}

func newAccount(a netip.Addr, real bool) *account {
	return &account{addr: a, slot: unknown, real: real, at: map[presence]bool{}, total: map[routers.Protocol]int{}, decoded: map[decoding]int{},
		counted: map[routers.Protocol]map[uint32]int{routers.IPFIX: {}, routers.BMP: {}}}
}

// latest stands for the epoch of records that carry none.
const latest = ^uint32(0)

// recordEpoch is the epoch in which a record was sent, as far as it tells.
func (a *account) recordEpoch(r peers.Record) uint32 {
	if a.real || r.Kind != peers.Flows && r.Kind != peers.Route {
		return latest
	}
	return r.Epoch
}

// home is where the device belonged in an epoch, and the home's index.
func (a *account) home(epoch uint32) (home, int) {
	for i := len(a.homes) - 1; i >= 0; i-- {
		if a.homes[i].from <= epoch {
			return a.homes[i], i
		}
	}
	return home{slot: a.slot, old: unknown}, 0
}

// moving tells whether the device may be at two collectors now.
func (a *account) moving() bool {
	h, _ := a.home(latest)
	return h.old != unknown
}

// welcome tells whether a collector is one at which a record of the device may be, and the index of the
// device's home at that time.
//
// In the epoch of a move that is the collector left, for what was sent before, and the one joined; a session
// that is younger than the move belongs to the one joined only. A message without an epoch may be read a
// little after the move has ended.
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

// move gives the device another slot from an epoch on. In that epoch it may be at both; settle ends this.
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

// split tells whether more than one collector heard of the device while it had one home.
func (a *account) split() bool {
	seen := map[int]int{}
	for p := range a.at {
		if p.home < len(a.homes) && a.homes[p.home].old != unknown {
			continue // it moved; who else heard of it was misdirected to
		}
		if seen[p.home]++; seen[p.home] > 1 {
			return true
		}
	}
	return false
}

// collectors are all that heard of the device.
func (a *account) collectors() map[int]bool {
	all := map[int]bool{}
	for p := range a.at {
		all[p.collector] = true
	}
	return all
}

// SPDX-License-Identifier: Apache-2.0

package guardstate

import (
	"cmp"
	"slices"
	"sync/atomic"
)

// Fields of a source's word, see source.h.
const (
	shownShift   = 12
	shownMask    = 4095
	scoreShift   = 24
	scoreMask    = 15
	scoreGranted = 14 // GUARD_GRANTED: it has a reservation
	scoreEarned  = 13 // GUARD_MAX_SCORE: it has earned one, but there was no room
)

// reservation is the reservation of a source.
type reservation struct {
	word    *uint64
	packets uint64 // per epoch
}

// reduce withdraws reservations until they fit a limit of perEpoch packets per epoch. Under attack
// three quarters of it can be reserved (guard_room, source.h). Otherwise lowering a limit during a
// flood would not help. Under the higher limit the flood's sources behaved, and their reservations
// would leave no room for others.
//
// The reservations of a flood are many and alike. So half of the room stays with the largest ones,
// held by a few resolvers or collectors, and half with the smallest. A source without its
// reservation keeps its score.
func (s *State) reduce(perEpoch uint64) {
	room := perEpoch / 4 * 3
	if uint64(atomic.LoadUint32(&s.Total.Reserved)) <= room {
		return
	}
	all := s.reservations()
	slices.SortFunc(all, func(a, b reservation) int { return cmp.Compare(b.packets, a.packets) })
	all = beyond(all, room/2)
	slices.Reverse(all)
	for _, r := range beyond(all, room/2) {
		s.takeBack(r)
	}
}

func (s *State) reservations() (all []reservation) {
	for b := range s.Sources {
		for i := range s.Sources[b].Source {
			p := &s.Sources[b].Source[i]
			if w := atomic.LoadUint64(p); w>>scoreShift&scoreMask == scoreGranted {
				all = append(all, reservation{p, w >> shownShift & shownMask})
			}
		}
	}
	return all
}

// beyond returns the reservations without room behind the previous ones. If one is too large, the
// next may still fit.
func beyond(all []reservation, room uint64) (out []reservation) {
	for _, r := range all {
		if r.packets > room {
			out = append(out, r)
			continue
		}
		room -= r.packets
	}
	return out
}

// takeBack withdraws a source's reservation and keeps it as earned. Programs may update the word concurrently. After eight collisions takeBack gives up.
func (s *State) takeBack(r reservation) {
	for range 8 {
		w := atomic.LoadUint64(r.word)
		if w>>scoreShift&scoreMask != scoreGranted {
			return
		}
		if atomic.CompareAndSwapUint64(r.word, w, w&^(scoreMask<<scoreShift)|scoreEarned<<scoreShift) {
			atomic.AddUint32(&s.Total.Reserved, -uint32(w>>shownShift&shownMask))
			atomic.AddUint32(&s.Total.Holders, ^uint32(0))
			return
		}
	}
}

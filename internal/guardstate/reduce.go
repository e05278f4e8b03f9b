// SPDX-License-Identifier: Apache-2.0

package guardstate

import (
	"cmp"
	"slices"
	"sync/atomic"
)

// Fields of a source's word: source.h.
const (
	shownShift   = 12
	shownMask    = 4095
	scoreShift   = 24
	scoreMask    = 15
	scoreGranted = 14 // GUARD_GRANTED: it has a reservation
	scoreEarned  = 13 // GUARD_MAX_SCORE: it has shown as much, and there was no room
)

// reservation is what a source has reserved.
type reservation struct {
	word    *uint64
	packets uint64 // an epoch
}

// reduce takes back reservations until they fit a limit of so many packets an epoch, of which three quarters can be reserved
// under attack (guard_room, source.h). Else a limit that proves too high in a flood could not be lowered: under it the
// flood's sources have been behaving, and what they reserved would leave no room for anybody.
//
// Those of a flood are many and alike. So half of the room stays with the largest, of which a few resolvers or
// collectors are, and half with the smallest. Who loses a reservation keeps what it has shown.
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

// beyond are the reservations for which there is no room behind those before them; one that is too large leaves it to the next.
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

// takeBack makes a source one that has earned its reservation and finds no room, beside programs that count its packets.
// It is left as it is where they do that again and again.
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

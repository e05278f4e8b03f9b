// SPDX-License-Identifier: Apache-2.0

package places_test

import (
	"net"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/lb/places"
	"github.com/weir-project/weir/feature/handoff/move"
)

func at(number move.Backend, mac byte) places.Backend {
	return places.Backend{Number: number, Name: string('a' + rune(number)), Interface: 1, MAC: net.HardwareAddr{2, 0, 0, 0, 0, mac}, Weight: 1}
}

// TestCheck checks which backends cannot be in one data path.
func TestCheck(t *testing.T) {
	nameless, off := at(3, 3), at(3, 3)
	nameless.Name, off.Interface = "", 0
	for says, with := range map[string]places.Backend{
		"":                                    at(3, 3),
		"another one has number 1":            at(1, 3),
		"is backend b's: give each backend a": at(3, 1),
		"number 1024: want 1 to 1023":         at(1024, 3),
		"backend 3 has no name":               nameless,
		"no interface leads to it":            off,
	} {
		err := places.Check([]places.Backend{at(1, 1), at(2, 2), with})
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("with %+v: %v, want %q", with, err, says)
		}
	}
}

// TestRing checks that a service's buckets go to its backends with a member, and to the others if
// there is none.
func TestRing(t *testing.T) {
	one, two, three := at(1, 1), at(2, 2), at(3, 3)
	two.Unserved, three.Services = []int{7}, []int{8}
	only := func(of []uint16, want ...uint16) {
		t.Helper()
		got := map[uint16]bool{}
		for _, number := range of {
			got[number] = true
		}
		if len(of) != places.Buckets || len(got) != len(want) {
			t.Errorf("%d buckets, backends %v: want %v", len(of), got, want)
		}
		for _, number := range want {
			if !got[number] {
				t.Errorf("backends %v: want %v", got, want)
			}
		}
	}
	only(places.Ring([]places.Backend{one, two, three}, 7), 1)
	only(places.Ring([]places.Backend{one, two, three}, 8), 1, 2, 3)
	only(places.Ring([]places.Backend{two, three}, 7), 2)
}

// TestAwaits checks for missing backends.
func TestAwaits(t *testing.T) {
	have := []places.Backend{at(1, 1), at(2, 2)}
	if places.Awaits(have, map[move.Backend]bool{2: true}) || !places.Awaits(have, map[move.Backend]bool{2: true, 3: true}) {
		t.Error("want backend 3 missing alone")
	}
}

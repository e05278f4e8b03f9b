// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
)

// TestHashKnownAnswers compares with known values of the kernel's jhash2 (include/linux/jhash.h), so Go and C cannot
// drift together.
func TestHashKnownAnswers(t *testing.T) {
	a := netip.MustParseAddr("192.0.2.7")
	if m := netip.MustParseAddr("::ffff:192.0.2.7"); spec.Hash(1, a) != spec.Hash(1, m) {
		t.Error("IPv4 and v4-mapped hash differently")
	}
	if spec.Hash(1, a) == spec.Hash(2, a) {
		t.Error("the seed does not matter")
	}
	if got := jhash2Reference(a.As16(), 0x12345678); got != spec.Hash(0x12345678, a) {
		t.Errorf("hash %#x, reference %#x", spec.Hash(0x12345678, a), got)
	}
}

// jhash2Reference is jhash2, transcribed from the C source.
func jhash2Reference(key [16]byte, initval uint32) uint32 {
	k := make([]uint32, 4)
	for i := range k {
		k[i] = binary.NativeEndian.Uint32(key[4*i:])
	}
	rol := func(w uint32, s uint) uint32 { return w<<(s&31) | w>>((-s)&31) }
	length := uint32(len(k))
	a := 0xdeadbeef + length<<2 + initval
	b, c := a, a
	for length > 3 {
		a += k[0]
		b += k[1]
		c += k[2]
		a -= c
		a ^= rol(c, 4)
		c += b
		b -= a
		b ^= rol(a, 6)
		a += c
		c -= b
		c ^= rol(b, 8)
		b += a
		a -= c
		a ^= rol(c, 16)
		c += b
		b -= a
		b ^= rol(a, 19)
		a += c
		c -= b
		c ^= rol(b, 4)
		b += a
		length -= 3
		k = k[3:]
	}
	a += k[0] // length is 1
	c ^= b
	c -= rol(b, 14)
	a ^= c
	a -= rol(c, 11)
	b ^= a
	b -= rol(a, 25)
	c ^= b
	c -= rol(b, 16)
	a ^= c
	a -= rol(c, 4)
	b ^= a
	b -= rol(a, 14)
	c ^= b
	c -= rol(b, 24)
	return c
}

func FuzzWhere(f *testing.F) {
	f.Add(uint32(1), []byte{192, 0, 2, 7}, 4)
	f.Add(uint32(0), []byte("\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"), 256)
	f.Fuzz(func(t *testing.T, seed uint32, b []byte, all int) {
		a, ok := netip.AddrFromSlice(b)
		if !ok || all < 1 || all > spec.MaxSlots {
			return
		}
		if h := jhash2Reference(a.As16(), seed); h != spec.Hash(seed, a) {
			t.Fatalf("%s seed %d: hash %#x, reference %#x", a, seed, spec.Hash(seed, a), h)
		}
		s := &state.Service{Seed: seed, OnEmpty: spec.Next}
		for i := range all {
			s.Slots = append(s.Slots, slots.State{Slot: i, State: "admitted"})
		}
		s.Table = spec.Assign(all)
		full, err := s.Where(state.WhatIf{}, a)
		if err != nil {
			t.Fatal(err)
		}
		p, err := s.Where(state.WhatIf{Without: []int{full[0].Slot}}, a)
		if err != nil {
			t.Fatal(err)
		}
		if p[0].Slot != full[0].Slot || p[0].Admitted {
			t.Fatalf("without its slot: %+v, with: %+v", p[0], full[0])
		}
		if (p[0].Instead == nil) != (all == 1) || p[0].Instead != nil && *p[0].Instead == p[0].Slot {
			t.Fatalf("diverted to %v of %d slots from %d", p[0].Instead, all, p[0].Slot)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"cmp"
	"encoding/binary"
	"slices"

	"github.com/weir-project/weir/table"
)

// Bindings are compared, and duplicates found, by sorting. With a million bindings, hash maps would take most of the
// time of a replace.

// bindingOrder is the sort key of a binding: IPv4 before IPv6, in words that compare fast.
type bindingOrder struct {
	hi, lo uint64 // address; IPv4 in lo
	rest   uint64 // bits, protocol, port
	v6     bool
	at     int32 // index
}

func newBindingOrder(k table.Key, at int) bindingOrder {
	o := bindingOrder{rest: uint64(k.Prefix.Bits())<<24 | uint64(k.Proto)<<16 | uint64(k.Port), at: int32(at)}
	if a := k.Prefix.Addr(); a.Is4() {
		b := a.As4()
		o.lo = uint64(binary.BigEndian.Uint32(b[:]))
	} else {
		b := a.As16()
		o.hi, o.lo, o.v6 = binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:]), true
	}
	return o
}

// compare returns 0 for the same key.
func (o bindingOrder) compare(p bindingOrder) int {
	switch {
	case o.v6 != p.v6:
		if p.v6 {
			return -1
		}
		return 1
	case o.hi != p.hi:
		return cmp.Compare(o.hi, p.hi)
	case o.lo != p.lo:
		return cmp.Compare(o.lo, p.lo)
	}
	return cmp.Compare(o.rest, p.rest)
}

// inOrder returns the sort keys of n bindings, sorted. The sort is stable.
func inOrder(n int, key func(i int) table.Key) []bindingOrder {
	out := make([]bindingOrder, n)
	for i := range out {
		out[i] = newBindingOrder(key(i), i)
	}
	slices.SortFunc(out, func(a, b bindingOrder) int {
		if c := a.compare(b); c != 0 {
			return c
		}
		return cmp.Compare(a.at, b.at)
	})
	return out
}

func bindingsInOrder(all []Binding) []bindingOrder {
	return inOrder(len(all), func(i int) table.Key { return all[i].key() })
}

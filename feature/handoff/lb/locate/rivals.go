// SPDX-License-Identifier: Apache-2.0

package locate

import (
	"cmp"
	"slices"
	"time"
)

// The data path knows a backend by its location: packets from there are the backend's. A location therefore belongs to one backend,
// even if several addresses lead to it.

// Found is a backend that is found somewhere.
type Found struct {
	Name   string
	Number uint16
	Named  bool      // the file says its address
	Since  time.Time // it was found there
	At     Key
}

// Rivals are the backends that are where another one is, each with that one's name: a backend of the file goes first, then the one that
// the data path knows there, then the one that was there first.
func Rivals(all []Found, known func(Key) uint16) map[uint16]string {
	at := map[Key][]Found{}
	for _, f := range all {
		at[f.At] = append(at[f.At], f)
	}
	rivals := map[uint16]string{}
	for key, all := range at {
		if len(all) < 2 {
			continue
		}
		before := known(key)
		owner := slices.MinFunc(all, func(a, b Found) int { return a.compare(b, before) })
		for _, f := range all {
			if f.Number != owner.Number {
				rivals[f.Number] = owner.Name
			}
		}
	}
	return rivals
}

func (f Found) compare(o Found, before uint16) int {
	return cmp.Or(first(f.Named, o.Named), first(f.Number == before, o.Number == before), f.Since.Compare(o.Since), cmp.Compare(f.Number, o.Number))
}

// first sorts yes before no.
func first(yes, other bool) int {
	switch {
	case yes == other:
		return 0
	case yes:
		return -1
	}
	return 1
}

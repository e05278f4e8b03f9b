// SPDX-License-Identifier: Apache-2.0

package locate

import (
	"cmp"
	"slices"
	"time"
)

// The data path identifies a backend by its location: packets from there are the backend's. A
// location therefore belongs to one backend, even if several addresses lead to it.

// Found is a located backend.
type Found struct {
	Name   string
	Number uint16
	Named  bool // the file has its address
	Proof  Proof
	Since  time.Time // time of the first locate at this location
	At     Key
}

// Proof tells how well a backend has shown that it runs at its location. Anybody can register an
// address of another machine.
type Proof int

// Proofs, in ascending order.
const (
	NoProof   Proof = iota
	ByPartner       // the partner, which may have its connection, reports it up
	ByOwn           // its agent connects from there
)

// Rivals returns the backends at another one's location, mapped to the name of its owner. A backend
// with an address in the file has precedence, then the one with the best proof, then the backend of
// the data path there, then the first one located there. known returns the data path's backend at a
// location, 0 for none.
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
	return cmp.Or(first(f.Named, o.Named), cmp.Compare(o.Proof, f.Proof), first(f.Number == before, o.Number == before), f.Since.Compare(o.Since), cmp.Compare(f.Number, o.Number))
}

// first sorts true before false.
func first(yes, other bool) int {
	switch {
	case yes == other:
		return 0
	case yes:
		return -1
	}
	return 1
}

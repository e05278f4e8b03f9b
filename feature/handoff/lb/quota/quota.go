// SPDX-License-Identifier: Apache-2.0

// Package quota limits the flows that backends' words alone make known: any backend could fill the table with them.
package quota

import (
	"fmt"

	"github.com/weir-project/weir/feature/handoff/move"
)

// Reports counts such flows. It has no lock.
type Reports struct {
	counted map[move.Backend]int // in the latest count of the table
	since   map[move.Backend]int // since that began
}

// Begin says that a count begins: flows that come meanwhile may count twice until the next one.
func (r *Reports) Begin() { r.since = nil }

// End takes the count.
func (r *Reports) End(counted map[move.Backend]int) { r.counted = counted }

// Add counts one more.
func (r *Reports) Add(b move.Backend) {
	if r.since == nil {
		r.since = map[move.Backend]int{}
	}
	r.since[b]++
}

// Room says whether there is room for one more of a backend in a table of this size: half of it for one backend, three quarters for all.
func (r *Reports) Room(b move.Backend, table int) error {
	if n := r.counted[b] + r.since[b]; n >= table/2 {
		return fmt.Errorf("%d sessions are known by this backend's word alone, the most for one backend", n)
	}
	all := 0
	for _, of := range []map[move.Backend]int{r.counted, r.since} {
		for _, n := range of {
			all += n
		}
	}
	if all >= table/4*3 {
		return fmt.Errorf("%d sessions are known by backends' words alone, the most for all", all)
	}
	return nil
}

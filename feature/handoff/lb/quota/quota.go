// SPDX-License-Identifier: Apache-2.0

// Package quota limits flows known by backends' reports alone. Without a limit any backend could
// fill the table.
package quota

import (
	"fmt"

	"github.com/weir-project/weir/feature/handoff/move"
)

// Reports counts such flows by backend. It has no lock.
type Reports struct {
	counted map[move.Backend]int // in the latest count of the table
	since   map[move.Backend]int // since the start of that count
}

// Begin starts a count. Flows added during the count may count twice until the next one.
func (r *Reports) Begin() { r.since = nil }

// End stores the result of the count.
func (r *Reports) End(counted map[move.Backend]int) { r.counted = counted }

// Add counts one more flow of a backend.
func (r *Reports) Add(b move.Backend) {
	if r.since == nil {
		r.since = map[move.Backend]int{}
	}
	r.since[b]++
}

// Room returns nil if a backend may add a flow to a table of this size. The limit is half of the
// table for one backend, and three quarters for all.
func (r *Reports) Room(b move.Backend, table int) error {
	if n := r.counted[b] + r.since[b]; n >= table/2 {
		return fmt.Errorf("%d sessions are known by this backend's reports alone, the limit for one backend", n)
	}
	all := 0
	for _, of := range []map[move.Backend]int{r.counted, r.since} {
		for _, n := range of {
			all += n
		}
	}
	if all >= table/4*3 {
		return fmt.Errorf("%d sessions are known by backends' reports alone, the limit for all", all)
	}
	return nil
}

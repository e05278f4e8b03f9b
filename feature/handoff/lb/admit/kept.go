// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
)

// Kept is a number kept for an absent backend.
type Kept struct {
	Since time.Time     // of its absence
	For   time.Duration // idle_timeout
	Flows bool          // it owns flows, and keeps the number as long as they are known
}

// Refusal returns the rest of an error for another backend that wants the number or the address: the
// remedies. name and number are the other backend's. Times of day stay the same in a
// repeated error, so it is logged once.
func (k Kept) Refusal(name string, number move.Backend) string {
	free := "free at"
	if k.Flows {
		free = "free after its flows, and not before"
	}
	return fmt.Sprintf(", absent since %s: %s %s, or name %s with number %d in lb.backends for a moment",
		clock(k.Since), free, clock(k.Since.Add(k.For)), name, number)
}

func clock(at time.Time) string { return at.UTC().Format("15:04:05 UTC") }

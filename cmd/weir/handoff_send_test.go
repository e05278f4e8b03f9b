// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/weir-project/weir/clients/go/handoff"
)

// A session moving to another backend belongs to the agent, and again to its member if the move fails.
func TestMovedFrom(t *testing.T) {
	was := handoff.SessionReport{ID: "7", Member: "0", PID: 5, Moves: 3}
	for name, x := range map[string]struct {
		is         handoff.SessionReport
		stay, back int
	}{
		"not yet":           {handoff.SessionReport{ID: "7", Member: "0", PID: 5, Moves: 3}, 1, 0},
		"offered":           {handoff.SessionReport{ID: "7", Member: "1", PID: 6, Moves: 4, Given: true}, 1, 0},
		"taken":             {handoff.SessionReport{ID: "7", Member: "1", PID: 6, Moves: 4}, 0, 0},
		"a newer process":   {handoff.SessionReport{ID: "7", Member: "0", PID: 6, Moves: 4}, 0, 0},
		"on its way back":   {handoff.SessionReport{ID: "7", Member: "0", PID: 5, Moves: 4, Given: true}, 1, 0},
		"back":              {handoff.SessionReport{ID: "7", Member: "0", PID: 5, Moves: 4}, 0, 1},
		"waits":             {handoff.SessionReport{ID: "7", Member: "1", Moves: 4}, 1, 0},
		"leaves":            {handoff.SessionReport{ID: "7", Member: "@s2", PID: 9, Moves: 4}, 1, 0},
		"back from there":   {handoff.SessionReport{ID: "7", Member: "0", PID: 5, Moves: 5}, 0, 1},
		"refused":           {handoff.SessionReport{ID: "7", Member: "0", PID: 5, Moves: 3, Rejected: 1, ReturnReason: "1 bytes were read"}, 0, 1},
		"at another server": {handoff.SessionReport{ID: "8", Member: "0", PID: 5}, 0, 0},
	} {
		r := handoff.Report{Services: []handoff.ServiceReport{{Sessions: []handoff.SessionReport{x.is}}}}
		if stay, back, why := movedFrom([]handoff.SessionReport{was}, r); stay != x.stay || back != x.back || (why == "") != (back == 0) {
			t.Errorf("%s: %d stay, %d are back (%q), want %d and %d", name, stay, back, why, x.stay, x.back)
		}
	}
}

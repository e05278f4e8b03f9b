// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"strings"
	"testing"
	"time"
)

// A shorter hold ends sessions that wait: the plan says so.
func TestPlanWarnsOfShorterHold(t *testing.T) {
	have := State{Limits: &Limits{Hold: time.Minute}}
	p, err := Feature{}.Plan(t.Context(), have, Limits{Hold: 10 * time.Second})
	if err != nil || len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], "handoff.keeper.hold 1m0s → 10s") {
		t.Errorf("shorter: %q, %v", p.Warnings, err)
	}
	if p, err = (Feature{}).Plan(t.Context(), have, Limits{}); err != nil || len(p.Warnings) != 1 {
		t.Errorf("the section is gone, and with it a minute: %q, %v", p.Warnings, err)
	}
	if p, err = (Feature{}).Plan(t.Context(), State{}, Limits{Hold: time.Minute}); err != nil || len(p.Warnings) != 0 {
		t.Errorf("longer: %q, %v", p.Warnings, err)
	}
}

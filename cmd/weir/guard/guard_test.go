// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/guard"
)

// A guard in a dry run rejects nothing, and its status does not say "refusing".
func TestPrintDryRun(t *testing.T) {
	for dry, want := range map[bool]string{false: "refusing", true: "would refuse"} {
		g := guard.GuardState{Service: "dns", Limit: 100, DryRun: dry, Counts: guard.Counts{UnderAttack: true, ReservationOwners: 1, Reserved: 12}}
		var one, all strings.Builder
		printGuard(&one, g)
		printGuards(&all, []guard.GuardState{g})
		if !strings.Contains(one.String(), "\n  "+want+": traffic exceeds the limit; reserved: 12 packets a second by 1 source\n") || !strings.Contains(all.String(), want) {
			t.Errorf("dry run %v: %s%s", dry, &one, &all)
		}
		if strings.Contains(one.String(), "dry run: packets counted as refused pass\n") != dry {
			t.Errorf("dry run %v: %s", dry, &one)
		}
	}
}

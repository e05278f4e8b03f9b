// SPDX-License-Identifier: Apache-2.0

package admit_test

import (
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/admit"
)

// TestRefusal checks that a refusal names both remedies.
func TestRefusal(t *testing.T) {
	k := admit.Kept{Since: time.Date(2026, 11, 28, 23, 30, 1, 0, time.UTC), For: time.Hour}
	if got, want := k.Refusal("s2x", 2), ", absent since 23:30:01 UTC: free at 00:30:01 UTC, or name s2x with number 2 in lb.backends for a moment"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	k.Flows = true
	if got, want := k.Refusal("s2x", 5), ", absent since 23:30:01 UTC: free after its flows, and not before 00:30:01 UTC, or name s2x with number 5 in lb.backends for a moment"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

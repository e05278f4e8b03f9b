// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"os"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/internal/nstest"
)

// A restored filter has its saved lists, even if their files have changed.
func TestRestoreLists(t *testing.T) {
	nstest.NeedRoot(t)
	for _, n := range []int{3, 2000} {
		w := newWorld(t)
		f := w.filter(HookTCX, Rule{Name: "listed", Match: Expression{Text: "udp and ip.src in $bad"}, Action: Drop})
		f.Lists = map[string]string{"bad": listOf(t, n, "10.77.0.0/24")}
		w.apply(f)
		saved, err := Feature{}.Save(t.Context(), w.root)
		if err != nil {
			t.Fatal(err)
		}
		if p, err := (Feature{}).PlanRestore(t.Context(), w.root, saved); err != nil || len(p.Steps) != 0 {
			t.Errorf("restoring the present state: got steps %v, %v, want none", p.Steps, err)
		}
		if err := os.WriteFile(f.Lists["bad"], []byte("192.0.2.1\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		w.apply(f)
		w.want("another list", "5001/4 5001/6", 5001)
		if p := w.restore(saved); len(p.Steps) != 1 {
			t.Fatalf("restoring: %v", p.Steps)
		}
		w.want("restored", "5001/6", 5001)
	}
}

// restore restores saved filters.
func (w *world) restore(saved []byte) feature.Plan {
	w.t.Helper()
	p, err := featuretest.Restore(w.t.Context(), w.root, Feature{}, saved)
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

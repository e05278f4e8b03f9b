// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"testing"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// TestLoadsOfMembersThatHaveGone checks that a gone member's last load of 0 attracts no session,
// even if another member has its name.
func TestLoadsOfMembersThatHaveGone(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	busy := w.join("busy", func(o *handoff.Options) { o.Balances = true }).Member()
	idle := w.join("idle", func(o *handoff.Options) { o.Stay = true })
	idle.Member().SetLoad(0)
	b := handoff.Balancer{Member: busy}
	nstest.Until(t, "the idle one is heard", func() bool { return b.Where(100) == "idle" })
	next := w.join("idle")
	next.Member().SetLoad(7)
	nstest.Until(t, "the next one is heard", func() bool { return busy.Loads()["idle"] == 7 })
	if err := idle.Close(); err != nil {
		t.Fatal(err)
	}
	busy.SetLoad(1)
	nstest.Until(t, "one member is left beside", func() bool {
		for _, s := range w.keeper.Report().Services {
			return len(s.Members) == 2
		}
		return false
	})
	if got := busy.Loads(); len(got) != 1 || got["idle"] != 7 {
		t.Errorf("%v", got)
	}
	if err := next.Close(); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "no load is left", func() bool { return len(busy.Loads()) == 0 })
	if to := b.Where(100); to != "" {
		t.Errorf("sessions go to %q, a gone member", to)
	}
}

// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// TestLiveChangesSayWhatTheyTake reports moves and drains that direct served traffic to an empty slot, and no others.
func TestLiveChangesSayWhatTheyTake(t *testing.T) { eachEngine(t, testLiveChangesSayWhatTheyTake) }

func testLiveChangesSayWhatTheyTake(t *testing.T) {
	a := startSink(t, "udp4=0.0.0.0:9991")
	b := startSink(t, "udp4=0.0.0.0:9991")
	w := newWorld(t, spec.Options{Slots: 3}, "udp 0.0.0.0:9991")
	w.member(0, a)
	w.member(1, b)
	w.apply()
	s := w.state()
	one := func(slot int) string { // a device of a slot
		for i := range 250 {
			at := netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
			if w.where(at)[0].Slot == slot {
				return at.String()
			}
		}
		t.Fatal("no device of slot", slot)
		return ""
	}
	served, lost := one(0), one(2)
	check := func(what, want string) func(feature.Plan, error) {
		return func(p feature.Plan, err error) {
			t.Helper()
			text := strings.Join(p.Outages, "\n")
			if err != nil || want == "" && text != "" || !strings.Contains(text, want) {
				t.Errorf("%s: %q, %v, want %q", what, text, err, want)
			}
		}
	}
	check("a device to a member", "")(OutagesOfMove(w.root, s, record.Moving{Device: served, To: 1}))
	check("a device to an empty slot", "device "+served+" is served by slot 0 of service svc, and would move to slot 2, which is empty (on_empty: reject)")(OutagesOfMove(w.root, s, record.Moving{Device: served, To: 2}))
	check("a device that nobody serves", "")(OutagesOfMove(w.root, s, record.Moving{Device: lost, To: 1}))
	bucket := w.where(netip.MustParseAddr(served))[0].Bucket
	check("a bucket to an empty slot", "slot 2 of service svc is empty and would get 1 %")(OutagesOfMove(w.root, s, record.Moving{Bucket: bucket, To: 2}))
	check("a bucket to a member", "")(OutagesOfMove(w.root, s, record.Moving{Bucket: bucket, To: 1}))
	check("a drain", "slot 2 of service svc is empty and would get 16 %")(OutagesOfDrain(w.root, s, 0, false))
	check("a drain of the empty slot", "")(OutagesOfDrain(w.root, s, 2, false))
	w.locked(func(l *kernel.WriteLock) error { return engine.Drain(l, w.slot(2), nil) })
	s = w.state()
	check("a drain that leaves members", "")(OutagesOfDrain(w.root, s, 0, false))
	check("the empty slot undrained", "slot 2 of service svc is empty and would get 33 %")(OutagesOfDrain(w.root, s, 2, true))
	w.locked(func(l *kernel.WriteLock) error { _, err := engine.Bypass(l, s.Scope(), "svc", true); return err })
	check("steered again, all served", "")(OutagesOfSteering(w.state()))
	b.kill()
	w.empties(1)
	check("steered again, a slot empty", fmt.Sprintf("slot 1 of service svc is empty (on_empty: reject) and would get 50 %% of the traffic of process %d", a.pid()))(OutagesOfSteering(w.state()))
}

// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// TestRegisterElsewhere: a failed command takes no member's slot. Sockets withdrawn from one slot may serve another,
// with both engines.
func TestRegisterElsewhere(t *testing.T) { eachEngine(t, testRegisterElsewhere) }

func testRegisterElsewhere(t *testing.T) {
	w, a, b := newPair(t)
	w.apply()
	w.check(sources(12), loopback4, names(a, b))
	at := func(slot int) slots.Slot { return slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: slot} }
	register := func(slot int, s *sink) (err error) {
		w.locked(func(l *kernel.WriteLock) error {
			_, err = engine.AdmitLocked(t.Context(), l, at(slot), &service.Member{Slot: slot, PID: s.pid()}, nil)
			return nil
		})
		return err
	}
	if underTest == spec.EngineReuseport { // a socket serves only one slot with this engine
		if err := register(1, a); !errors.Is(err, engine.ErrSocketInUse) {
			t.Errorf("a socket that serves slot 0 is given slot 1 as well: %v", err)
		}
		w.check(sources(12), loopback4, names(a, b))
	}
	for _, s := range []int{0, 1} {
		w.locked(func(l *kernel.WriteLock) error { return engine.Withdraw(l, at(s)) })
	}
	for slot, s := range []*sink{b, a} {
		if err := register(slot, s); err != nil {
			t.Fatal(err)
		}
	}
	w.check(sources(12), loopback4, names(b, a))
}

// TestAdmitsNoOtherSlotsProcess: a wrong slot number takes no slot from its member.
func TestAdmitsNoOtherSlotsProcess(t *testing.T) {
	w, a, b := newPair(t)
	w.apply()
	w.check(sources(12), loopback4, names(a, b))
	at := func(slot int) slots.Slot { return slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: slot} }
	_, err := engine.AdmitWithin(t.Context(), w.root, at(0), &service.Member{PID: b.pid()}, time.Minute)
	if !errors.Is(err, engine.ErrOtherSlot) || !strings.Contains(err.Error(), "serves slot 1 of svc: run weir steer withdraw svc --slot 1 first") {
		t.Errorf("the member of slot 1 is given slot 0 as well: %v", err)
	}
	w.check(sources(12), loopback4, names(a, b))
	if changed, err := engine.AdmitWithin(t.Context(), w.root, at(0), &service.Member{PID: a.pid()}, time.Minute); err != nil || changed {
		t.Errorf("the member of slot 0 once more: changed %v, %v", changed, err)
	}
}

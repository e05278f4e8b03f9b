// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/kernel"
)

// older marks the only filter's pins as compiled by another weir.
func (w *world) older() {
	w.t.Helper()
	l, err := w.root.Lock(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	defer l.Unlock()
	i := w.one().inst
	o, err := l.Open(i)
	if err != nil {
		w.t.Fatal(err)
	}
	defer o.Close()
	links, err := o.Links()
	if err != nil {
		w.t.Fatal(err)
	}
	meta := o.Meta
	meta.Object[0]++
	meta.Version = "v0.1"
	if err := l.Upgrade(i, kernel.Upgrade{Meta: meta, Pins: kernel.Pins{Maps: o.Maps}, Keep: links, Swap: func() error { return nil }}); err != nil {
		w.t.Fatal(err)
	}
}

// weir upgrade recompiles programs of another weir, and counts continue.
func TestUpgrade(t *testing.T) {
	eachHook(t, func(t *testing.T, h Hook) {
		w := newWorld(t)
		w.apply(w.filter(h, drops(5001)))
		w.want("created", "5002/4 5002/6", 5001, 5002)
		if p, err := (Feature{}).PlanUpgrade(t.Context(), w.root); err != nil || len(p.Steps) != 0 {
			t.Errorf("just applied: %v, %v", p, err)
		}
		w.older()
		if f, err := (Feature{}).Examine(t.Context(), w.root); err != nil || len(f) != 1 || !strings.Contains(f[0].Text, "v0.1") {
			t.Errorf("doctor: %+v, %v", f, err)
		}
		if steps, err := featuretest.Upgrade(t.Context(), w.root, Feature{}); err != nil || len(steps) != 1 || !strings.HasPrefix(steps[0], "upgrade filter test: compiled by weir v0.1") {
			t.Fatalf("%v, %v", steps, err)
		}
		w.want("upgraded", "5002/4 5002/6", 5001, 5002)
		w.wantCounts(map[string]uint64{"p5001": 4})
		if p, err := (Feature{}).PlanUpgrade(t.Context(), w.root); err != nil || len(p.Steps) != 0 {
			t.Errorf("upgraded: %v, %v", p, err)
		}
		w.older()
		if steps := w.apply(w.filter(h, drops(5001))); len(steps) != 1 || !strings.Contains(steps[0], "the program of another weir, v0.1") {
			t.Errorf("apply: %q", steps)
		}
	})
}

// Pins of a newer weir are left unchanged, with a warning.
func TestNewerABI(t *testing.T) {
	needHook(t, HookNFT)
	w := newWorld(t)
	w.apply(w.filter(HookNFT, drops(5001)))
	i := w.one().inst
	set := func(abi uint32) {
		t.Helper()
		l, err := w.root.Lock(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Unlock()
		o, err := l.Open(i)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		meta := o.Meta
		meta.ABI = abi
		if err := l.Upgrade(i, kernel.Upgrade{Meta: meta, Pins: kernel.Pins{Maps: o.Maps}, Swap: func() error { return nil }}); err != nil {
			t.Fatal(err)
		}
	}
	set(abi + 1)
	st, err := ReadState(t.Context(), w.root)
	if err != nil || st.Err() == nil || !strings.Contains(st.Err().Error(), "use that version") {
		t.Errorf("read: %v, %v", err, st.Err())
	}
	if p, err := (Feature{}).Plan(t.Context(), st, Config{}); err != nil || len(p.Steps) > 0 || len(p.Unread) != 1 || !strings.Contains(p.Warnings[0], "stays as it is") {
		t.Errorf("plan %+v, %v", p, err)
	}
	if steps, err := applyTo(t.Context(), w.root); err != nil || len(steps) > 0 {
		t.Errorf("applied: %v, %v", steps, err)
	}
	w.want("not changed", "5002/4 5002/6", 5001, 5002)
	set(abi)
}

// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/ipfix/ipfixtest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// keepTemplates stores templates of an exporter like weir serve.
func (w *world) keepTemplates() {
	w.t.Helper()
	w.locked(func(l *kernel.WriteLock) error {
		ns, err := netns.OfScope("", w.state().Scope(), 0)
		if err != nil {
			return err
		}
		defer ns.Close()
		store, err := templates.OpenStore(l, ns)
		if err != nil {
			return err
		}
		defer store.Close()
		k := bpf.TemplatesSession{Src: netip.MustParseAddr("192.0.2.7").As16(), Dst: netip.MustParseAddr("127.0.0.1").As16(), Sport: 4000, Dport: 9991, Version: ipfix.IPFIX, Domain: 1}
		return errors.Join(store.Save(k, &templates.FlowSession{Templates: ipfixtest.Templates(ipfix.IPFIX)}), store.Enter(k, bpf.TemplatesHeard{}))
	})
}

func (w *world) keptTemplates(scope string) int {
	w.t.Helper()
	all, err := templates.Save(w.root, scope)
	if err != nil {
		w.t.Fatal(err)
	}
	return len(all)
}

// TestTemplatesComeBack: templates are removed with the last service of a namespace and restored with it: after a
// failed change, and by a later process from the saved state.
func TestTemplatesComeBack(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	w.apply()
	w.keepTemplates()
	scope := w.state().Scope()
	saved, err := Feature{}.Save(t.Context(), w.root)
	if err != nil {
		t.Fatal(err)
	}
	w.locked(func(l *kernel.WriteLock) error {
		have, err := state.Read(t.Context(), w.root)
		if err != nil {
			return err
		}
		plan, err := Feature{}.Plan(t.Context(), have, spec.Config{})
		if err != nil {
			return err
		}
		if err := plan.Apply(t.Context(), l, func(feature.Step, string) {}); err != nil {
			return err
		}
		if n := w.keptTemplates(scope); n != 0 {
			t.Errorf("the service is gone, and templates of %d exporters are remembered", n)
		}
		for _, undo := range plan.Undo {
			err = errors.Join(err, undo(t.Context(), l))
		}
		return err
	})
	if n := w.keptTemplates(scope); n != 1 {
		t.Errorf("taken back, and templates of %d exporters are remembered, want 1", n)
	}
	w.cfg.Services = nil
	w.apply()
	w.locked(func(l *kernel.WriteLock) error {
		plan, err := Feature{}.PlanRestore(t.Context(), w.root, saved)
		if err != nil {
			return err
		}
		return plan.Apply(t.Context(), l, func(feature.Step, string) {})
	})
	if n := w.keptTemplates(scope); n != 1 {
		t.Errorf("restored, and templates of %d exporters are remembered, want 1", n)
	}
	again, err := Feature{}.Save(t.Context(), w.root)
	if err != nil || string(again) != string(saved) {
		t.Errorf("restored:\n%s\nwant\n%s\n%v", again, saved, err)
	}
	if plan, err := (Feature{}).PlanRestore(t.Context(), w.root, saved); err != nil || len(plan.Steps) != 0 {
		t.Errorf("restoring what is there: %v, %v", plan.Steps, err)
	}
}

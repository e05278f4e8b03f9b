// SPDX-License-Identifier: Apache-2.0

package host

import (
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
)

// otherObject makes the engines' pins record another object.
func (w world) otherObject() {
	w.t.Helper()
	metas, err := filepath.Glob(filepath.Join(w.Root.Path(), "*", "steer", "@*", "meta"))
	if err != nil || len(metas) == 0 {
		w.t.Fatalf("engines: %v, %v", metas, err)
	}
	for _, path := range metas {
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			w.t.Fatal(err)
		}
		b, err := m.LookupBytes(uint32(0))
		if err == nil {
			copy(b[16:48], make([]byte, 32)) // docs/PINS.md
			err = m.Put(uint32(0), b)
		}
		m.Close()
		if err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w world) upgradePlan() []string {
	w.t.Helper()
	p, err := w.UpgradePlan(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, s := range p.Steps {
		out = append(out, s.String())
	}
	return out
}

func (w world) upgrade() []string {
	w.t.Helper()
	var out []string
	if err := w.Upgrade(w.t.Context(), func(d Done) { out = append(out, d.Step.String()) }); err != nil {
		w.t.Fatal(err)
	}
	return out
}

func TestUpgrade(t *testing.T) {
	w := newWorld(t)
	wantSteps(t, w.upgradePlan())
	wantSteps(t, w.upgrade()) // nothing exists
	if left := w.dump(); len(left) != 0 {
		t.Errorf("upgrading nothing made %v", left)
	}
	pid, _ := daemon(t, "0.0.0.0:4739")
	c := w.config(twoServices, pid)
	w.apply(c)
	before := w.dump()
	wantSteps(t, w.upgrade())
	same(t, "upgrading what is this weir's", before, w.dump())

	const step = "upgrade engine sk_lookup of net:["
	w.otherObject()
	if o := w.state().Outdated; len(o) != 1 || o[0].Object != "000000000000" {
		t.Errorf("outdated: %v", o)
	}
	before = w.dump()
	wantSteps(t, w.upgradePlan(), step)
	wantSteps(t, w.plan(c), step)
	d := w.Doctor(t.Context())
	if !slices.ContainsFunc(d.Findings, func(f Finding) bool { return strings.Contains(f.Remedy, "weir upgrade") }) {
		t.Errorf("doctor finds %+v", d.Findings)
	}
	same(t, "planning and looking", before, w.dump())
	wantSteps(t, w.upgrade(), step)
	if o := w.state().Outdated; len(o) != 0 {
		t.Errorf("upgraded, and outdated: %v", o)
	}
	if s := w.state().Services; len(s) != 2 || !s[1].Slots[0].Admitted() {
		t.Errorf("upgraded, and the services are %+v", s)
	}
	if got := w.handled(4739, "telemetry"); got != "telemetry" {
		t.Errorf("upgraded, and port 4739 is counted by %q", got)
	}
	wantSteps(t, w.plan(c))

	w.otherObject()
	wantSteps(t, w.apply(c), step)
	wantSteps(t, w.apply(c))
}

// Concurrent upgrade and apply commands wait for each other.
func TestUpgradeAndApplyAtOnce(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	one, two := w.config(oneService, pid), w.config(twoServices, pid)
	w.apply(one)
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for n := range 5 {
				var err error
				switch {
				case i < 2:
					err = w.Upgrade(t.Context(), func(Done) {})
				case n%2 == 0:
					err = w.Apply(t.Context(), two, func(Done) {})
				default:
					err = w.Apply(t.Context(), one, func(Done) {})
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	w.apply(two)
	wantSteps(t, w.plan(two))
	for port, want := range map[int]string{4739: "telemetry", 2055: "flows"} {
		if got := w.handled(port, want); got != want {
			t.Errorf("port %d is counted by %q, want %q", port, got, want)
		}
	}
}

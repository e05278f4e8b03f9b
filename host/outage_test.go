// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/internal/nstest"
)

// A change that would empty a slot is rejected with the reason and changes nothing, unless it is allowed.
func TestApplyRefusesOutages(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	w.apply(w.config(twoServices, pid))
	before := w.dump()
	c := w.config(strings.Replace(twoServices, "tcp 0.0.0.0:4739", "tcp 0.0.0.0:4739, udp 0.0.0.0:4740", 1), pid)
	p, err := w.Plan(t.Context(), c)
	if err != nil || len(p.Outages) != 1 || !strings.Contains(p.Outages[0], "slot 0 of service telemetry would be emptied") {
		t.Errorf("planned outages %q, %v", p.Outages, err)
	}
	err = w.Apply(t.Context(), c, func(d Done) { t.Errorf("did %s", d.Step) })
	if !errors.Is(err, feature.ErrOutage) || !strings.Contains(err.Error(), p.Outages[0]) || !strings.Contains(err.Error(), "--allow-outage") {
		t.Errorf("applied: %v", err)
	}
	same(t, "a refused change", before, w.dump())
	c.AllowOutage = true
	w.apply(c)
	if s := w.state().Services[1]; s.Slots[0].Admitted() || len(s.Listen) != 3 {
		t.Errorf("allowed, and the service is %+v", s)
	}
}

// A misspelt interface of a running filter is rejected with its position in the file, and the filter stays.
func TestApplyRefusesAbsentInterface(t *testing.T) {
	w := newWorld(t)
	const text = "filter:\n  - name: late\n    hook: clsact\n    interfaces: [%s]\n    rules: [{match: 'udp.dstport == 9', action: drop}]\n"
	w.apply(w.config(text, "lo"))
	before := w.dump()
	err := w.Apply(t.Context(), w.config(text, "l0"), func(d Done) { t.Errorf("did %s", d.Step) })
	if want := ".yaml:4:17: filter.late: interfaces: it works at lo now, and would not at l0: there is no interface l0"; !errors.Is(err, feature.ErrOutage) || !strings.Contains(err.Error(), want) {
		t.Errorf("applied: %v, want %q", err, want)
	}
	same(t, "a refused change", before, w.dump())
	w.apply(w.config(text, "lo, l0"))
}

// Remove fails if it would take traffic away, and then removes nothing of any feature.
func TestRemoveRefusesOutages(t *testing.T) {
	w, _, _ := damagedWorld(t)
	l, err := w.Root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = reroute.Drain(l, "core")
	l.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	before := w.dump()
	for _, name := range []string{"reroute", ""} {
		err := w.Remove(t.Context(), name, false)
		if !errors.Is(err, feature.ErrOutage) || !strings.Contains(err.Error(), "path core: interface d0") || !strings.Contains(err.Error(), "drained") {
			t.Errorf("remove %s: %v", name, err)
		}
	}
	same(t, "a refused removal", before, w.dump())
	if err := w.Remove(t.Context(), "filter", false); err != nil {
		t.Errorf("another feature: %v", err)
	}
	if err := w.Remove(t.Context(), "reroute", true); err != nil {
		t.Errorf("allowed: %v", err)
	}
}

// weir serve rejects an outage of its file like weir apply, also at its start, unless nothing is applied yet.
func TestServeRefusesOutages(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	path := filepath.Join(t.TempDir(), "weir.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, fmt.Appendf(nil, text, pid), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	serve := func(until func(log string) bool) {
		t.Helper()
		log := &nstest.Log{}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- w.Serve(ctx, ServeOptions{File: path, Log: slog.New(slog.NewTextHandler(log, nil))}) }()
		nstest.Until(t, "weir serve tells what became of its file", func() bool { return until(log.String()) })
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	write(twoServices) // one of its slots has no member
	serve(func(log string) bool { return strings.Contains(log, "file applied") })
	before := w.state().Services[1].Listen
	write(strings.Replace(twoServices, "tcp 0.0.0.0:4739", "tcp 0.0.0.0:4739, udp 0.0.0.0:4740", 1))
	serve(func(log string) bool {
		return strings.Contains(log, "file not applied yet, retrying") && strings.Contains(log, "slot 0 of service telemetry would be emptied")
	})
	if v := w.state().Services[1]; !slices.Equal(v.Listen, before) || !v.Slots[0].Admitted() {
		t.Errorf("a file with an outage was applied: %+v", v)
	}
}

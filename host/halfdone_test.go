// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// toldHalfDone reports whether status and doctor tell of a half done change by a command.
func (w world) toldHalfDone(command string) (status, doctor bool) {
	w.t.Helper()
	read, err := w.Reader("/nonexistent").Status(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	text, err := json.Marshal(read)
	var st Status
	if err != nil || json.Unmarshal(text, &st) != nil {
		w.t.Fatal(err)
	}
	return st.HalfDone != nil && strings.Contains(st.HalfDone.Finding().Text, command), slices.ContainsFunc(w.Doctor(w.t.Context()).Findings, func(f Finding) bool {
		return f.Level == "warning" && strings.Contains(f.Text, "half done") && strings.Contains(f.Text, command) && strings.Contains(f.Remedy, "weir apply")
	})
}

// Status and doctor tell of a change made in part by a killed weir apply, until the next one. A change in progress is
// none.
func TestHalfDone(t *testing.T) {
	w := newWorld(t)
	c := w.config(oneService, absent)
	w.apply(c)
	told := func() (status, doctor bool) { return w.toldHalfDone("weir apply was killed") }
	if status, doctor := told(); status || doctor {
		t.Errorf("after a complete change: status %v, doctor %v", status, doctor)
	}
	l, err := w.Root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = w.underway(l, false, func() error { return feature.ErrNotUndone }) // as after a kill
	if half, err := w.HalfDone(); half != nil || err != nil {
		t.Errorf("in progress: %+v, %v", half, err)
	}
	l.Unlock()
	if status, doctor := told(); !status || !doctor {
		t.Errorf("after a kill: status %v, doctor %v", status, doctor)
	}
	w.apply(c)
	if status, doctor := told(); status || doctor {
		t.Errorf("after the next apply: status %v, doctor %v", status, doctor)
	}
}

// Status and doctor tell of a killed weir remove, until the next one or weir apply. A removal of a part keeps the note
// of a killed weir apply.
func TestHalfDoneRemoval(t *testing.T) {
	w := newWorld(t)
	c := w.config(oneService, absent)
	want := func(when, command string, want bool) {
		t.Helper()
		if status, doctor := w.toldHalfDone(command); status != want || doctor != want {
			t.Errorf("%s: status %v, doctor %v", when, status, doctor)
		}
	}
	for name, finish := range map[string]func(){"remove": func() { w.remove("") }, "apply": func() { w.apply(c) }} {
		w.apply(c)
		if step := kerneltest.Killed(t, child("apply", w.Root.Path(), "remove", "remove:")); step == "" {
			t.Fatal("not killed")
		}
		want("killed", "weir remove was killed", true)
		finish()
		want("after "+name, "", false)
	}
	w.apply(c)
	l, err := w.Root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = w.underway(l, false, func() error { return feature.ErrNotUndone }) // as after a kill
	l.Unlock()
	w.remove("guard")
	want("a killed apply and a removal", "weir apply was killed", true)
	if err := os.WriteFile(w.Root.KeptPath(keptUnderway), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	want("unreadable", w.Root.KeptPath(keptUnderway), true)
	w.apply(c)
	want("after apply", "", false)
}

func (w world) remove(name string) {
	w.t.Helper()
	if err := w.Remove(w.t.Context(), name, true); err != nil {
		w.t.Error(err)
	}
}

// A damaged saved state is no obstacle to a removal.
func TestRemoveDespiteDamagedState(t *testing.T) {
	w, _, _ := confirmWorld(t)
	w.apply(w.after(time.Hour))
	if err := os.WriteFile(w.Root.KeptPath(keptBefore), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.remove("guard")
	err := w.Rollback(t.Context(), func(Done) {})
	if err == nil || !strings.Contains(err.Error(), w.Root.KeptPath(keptBefore)) || !strings.Contains(err.Error(), "weir confirm") {
		t.Errorf("rollback: %v", err)
	}
}

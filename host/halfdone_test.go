// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
)

// Status and doctor tell of a change made in part by a killed weir apply, until the next one. A change in progress is
// none.
func TestHalfDone(t *testing.T) {
	w := newWorld(t)
	c := w.config(oneService, absent)
	w.apply(c)
	told := func() (status, doctor bool) {
		t.Helper()
		read, err := w.Reader("/nonexistent").Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(read)
		var st Status
		if err != nil || json.Unmarshal(text, &st) != nil {
			t.Fatal(err)
		}
		return st.HalfDone != nil, slices.ContainsFunc(w.Doctor(t.Context()).Findings, func(f Finding) bool {
			return f.Level == "warning" && strings.Contains(f.Text, "half done") && strings.Contains(f.Remedy, "weir apply")
		})
	}
	if status, doctor := told(); status || doctor {
		t.Errorf("after a complete change: status %v, doctor %v", status, doctor)
	}
	l, err := w.Root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = w.underway(l, func() error { return feature.ErrNotUndone }) // as after a kill
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

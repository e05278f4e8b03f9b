// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/explain"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/service"
)

// TestHolderIsNotTheMember: status, doctor and explain show the actual process of a slot if it is not the configured
// member's.
func TestHolderIsNotTheMember(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	own, other := startSink(t, "udp4=0.0.0.0:9991"), startSink(t, "udp4=0.0.0.0:9991")
	w.member(0, own)
	w.apply()
	holder := func() string {
		t.Helper()
		st, err := state.Read(t.Context(), w.root)
		if err != nil {
			t.Fatal(err)
		}
		st.ExplainEmpty(t.Context())
		return st.Services[0].Slots[0].Occupant
	}
	if got := holder(); got != "" {
		t.Errorf("the configured member: holder %q", got)
	}
	slot := slots.Slot{Scope: w.state().PinScope, Service: "svc"}
	give := func(m *service.Member) {
		t.Helper()
		l, err := w.root.Lock(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Unlock()
		if _, err := engine.AdmitLocked(t.Context(), l, slot, m, nil); err != nil {
			t.Fatal(err)
		}
	}
	give(&service.Member{PID: other.pid()})
	want := fmt.Sprintf("process %d (", other.pid())
	if got := holder(); !strings.HasPrefix(got, want) {
		t.Errorf("another process: holder %q, want %s", got, want)
	}
	if got := w.found(); !strings.Contains(got, "slot 0 has "+want) || !strings.Contains(got, fmt.Sprintf("configured member is pid %d", own.pid())) {
		t.Errorf("doctor: %q", got)
	}
	st := w.state()
	if got := explain.MemberText(st, st.Slots[0]); !strings.Contains(got, want) || !strings.Contains(got, "in place of pid") {
		t.Errorf("explain: %q", got)
	}
	give(nil)
	if got := holder(); got != "" {
		t.Errorf("back: holder %q", got)
	}
}

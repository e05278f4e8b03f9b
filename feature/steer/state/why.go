// SPDX-License-Identifier: Apache-2.0

package state

import (
	"context"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/service"
)

// Why a slot is empty is one text for status, explain, doctor and metrics. What keeps a
// member out before it is put in place is found out anew, by looking for it as weir serve
// does. What keeps it out later, and checks, only the last try knows: it is remarked.

// ReasonBudget bounds how long one reading looks for members of empty slots. Slots beyond it
// are told what was remarked.
const ReasonBudget = 2 * time.Second

// ExplainEmpty finds out why slots are empty, and which are a process's that their
// configured member does not name.
func (st *State) ExplainEmpty(ctx context.Context) {
	until := time.Now().Add(ReasonBudget)
	for i := range st.Services {
		st.Services[i].ExplainEmpty(ctx, until)
	}
}

// Occupant names the process that serves a slot in place of its configured member; "": the member does, or that cannot be told. Where the
// configured member names no process, the last try to admit it tells: it was remarked.
func (s *Service) Occupant(slot slots.State) string {
	m := s.Record.Service.Member(slot.Slot)
	if m == nil || !slot.Admitted() {
		return ""
	}
	if has, known := m.Has(slot.PID); has || known {
		return m.Occupant(slot.PID)
	}
	if _, kept := s.remarked(slot.Slot); kept && slot.Lives() {
		return service.ProcessName(slot.PID)
	}
	return ""
}

// remarked is why the last try to admit a slot's member failed. kept: another process served the slot.
func (s *Service) remarked(slot int) (why string, kept bool) {
	return strings.CutPrefix(s.Root.Remarks(record.Instance(s.PinScope, s.Name), strconv.Itoa(slot)), engine.KeptMark)
}

// ExplainEmpty looks for the reason of each empty slot, until a time.
func (s *Service) ExplainEmpty(ctx context.Context, until time.Time) {
	for n := range s.Slots {
		slot := &s.Slots[n]
		m := s.Record.Service.Member(slot.Slot)
		if m != nil && slot.Admitted() && time.Now().Before(until) {
			slot.Occupant = s.Occupant(*slot)
			if why, kept := s.remarked(slot.Slot); kept && slot.Occupant != "" && slot.Reason == "" {
				slot.Reason = "its member is not there: " + strings.TrimPrefix(why, engine.LateMark)
			}
		}
		if slot.Admitted() || slot.Withdrawn || m == nil {
			continue
		}
		key := slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: slot.Slot}
		why := s.whyEmpty(ctx, key, time.Now().Before(until) && os.Geteuid() == 0)
		switch {
		case why == "", slot.Tells(why):
		case slot.Never:
			slot.Reason = slot.Member + ": " + why
		default:
			slot.Reason += "; now: " + why
		}
	}
}

// whyEmpty says what keeps a slot's configured member out.
func (s *Service) whyEmpty(ctx context.Context, key slots.Slot, look bool) string {
	remarked, _ := s.remarked(key.Slot)
	late, isLate := strings.CutPrefix(remarked, engine.LateMark)
	if !look {
		return late
	}
	m := *s.Record.Service.Member(key.Slot)
	_, err := engine.FindMember(s.Record, ctx, key, m)
	switch {
	case err != nil:
		return strings.ToValidUTF8(err.Error(), "?")
	case isLate:
		return late
	}
	return "all its sockets are there: a running weir serve admits it, or weir apply"
}

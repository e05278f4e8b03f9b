// SPDX-License-Identifier: Apache-2.0

package state

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/service"
)

// The reason of an empty slot is one text for status, explain, doctor and metrics. Reasons before the admission are
// found again by a search for the member, like in weir serve. Failed checks and errors during the admission are known
// only from the last attempt, through its remark.

// ReasonBudget limits the time of the searches in one reading. Slots beyond it show the remark.
const ReasonBudget = 2 * time.Second

// ExplainEmpty finds the reasons of empty slots, and slots occupied by a process other than their configured member.
func (st *State) ExplainEmpty(ctx context.Context) {
	until := time.Now().Add(ReasonBudget)
	for i := range st.Services {
		st.Services[i].ExplainEmpty(ctx, until)
	}
}

// Occupant names the process in the slot if it is not the configured member. "" means that it is, or that this is
// unknown. If the configured member names no process, the remark of the last admission attempt decides.
func (s *Service) Occupant(slot slots.State) string {
	m := s.Record.Service.Member(slot.Slot)
	if m == nil || !slot.Admitted() || slot.Idle {
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

// remarked returns the error of the last attempt to admit a slot's member. kept: another process occupied the slot.
func (s *Service) remarked(slot int) (why string, kept bool) {
	return strings.CutPrefix(s.Root.Remarks(record.Instance(s.PinScope, s.Name), strconv.Itoa(slot)), engine.KeptMark)
}

// ExplainEmpty finds the reason of each empty slot. It searches for members until the given time.
func (s *Service) ExplainEmpty(ctx context.Context, until time.Time) {
	for n := range s.Slots {
		slot := &s.Slots[n]
		m := s.Record.Service.Member(slot.Slot)
		if m != nil && slot.Admitted() && time.Now().Before(until) {
			slot.Occupant = s.Occupant(*slot)
			if why, kept := s.remarked(slot.Slot); kept && slot.Reason == "" && !slot.Idle {
				what := "its member is missing: "
				if slot.Occupant == "" {
					what = "its member serves from its former sockets: "
				}
				slot.Reason = what + strings.TrimPrefix(why, engine.LateMark)
			}
		}
		if slot.Admitted() || slot.Withdrawn || m == nil {
			continue
		}
		key := slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: slot.Slot}
		why := s.whyEmpty(ctx, key, time.Now().Before(until) && users.SeesAll())
		switch {
		case why == "", slot.Tells(why):
		case slot.Never:
			slot.Reason = why
			if _, name, _ := strings.Cut(slot.Member, " "); !strings.Contains(why, name) {
				slot.Reason = slot.Member + ": " + why
			}
		default:
			slot.Reason += "; now: " + why
		}
	}
}

// whyEmpty returns the reason that keeps a slot's configured member out.
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
	return "all its sockets exist: weir serve or weir apply admits it"
}

// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// Why a slot is empty is one text for status, explain, doctor and metrics. What keeps a
// member out before it is put in place is found out anew, by looking for it as weir serve
// does. What keeps it out later, and checks, only the last try knows: it is remarked.

// whyBudget bounds how long one reading looks for members of empty slots. Slots beyond it
// are told what was remarked.
const whyBudget = 2 * time.Second

// remark keeps why a slot stays empty, for readers; nil ends it.
func remark(r *kernel.Root, s Slot, err error) {
	text := ""
	if err != nil {
		text = strings.ToValidUTF8(err.Error(), "?")
		if !foundBeforehand(err) {
			text = lateMark + text
		}
	}
	r.Remark(serviceInstance(s.Scope, s.Service), strconv.Itoa(s.Slot), text)
}

// lateMark begins a remark that looking for the member does not find out.
const lateMark = "+"

// foundBeforehand says whether looking for a member finds the error.
func foundBeforehand(err error) bool {
	for _, e := range []error{service.ErrNotRunning, service.ErrNoSocket, service.ErrNarrow, service.ErrAmbiguous, service.ErrMPTCP, service.ErrElsewhere,
		units.ErrNoSystemd, units.ErrNoUnit, os.ErrPermission} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// ExplainEmpty finds out why slots are empty, and which are a process's that their
// configured member does not name.
func (st *State) ExplainEmpty(ctx context.Context) {
	until := time.Now().Add(whyBudget)
	for i := range st.Services {
		st.Services[i].explainEmpty(ctx, until)
	}
}

func (s *ServiceState) explainEmpty(ctx context.Context, until time.Time) {
	for n := range s.Slots {
		slot := &s.Slots[n]
		m := s.pub.Service.Member(slot.Slot)
		if m != nil && slot.Admitted() && time.Now().Before(until) {
			slot.Holder = m.Holder(slot.PID)
		}
		if slot.Admitted() || slot.withdrawn || m == nil {
			continue
		}
		key := Slot{Scope: s.scope, Service: s.Name, Slot: slot.Slot}
		why := s.whyEmpty(ctx, key, time.Now().Before(until) && os.Geteuid() == 0)
		switch {
		case why == "", slot.tells(why):
		case slot.never:
			slot.Reason = slot.Member + ": " + why
		default:
			slot.Reason += "; now: " + why
		}
	}
}

// tells says whether a slot's own reason says the same: it exited, or closed what is missing.
func (s SlotState) tells(why string) bool {
	if s.exited {
		return strings.Contains(why, "has exited")
	}
	_, lacks, found := strings.Cut(why, service.ErrNoSocket.Error()+": ")
	_, closed, _ := strings.Cut(s.Reason, " closed ")
	return !s.never && found && lacks == closed
}

// whyEmpty says what keeps a slot's configured member out.
func (s *ServiceState) whyEmpty(ctx context.Context, key Slot, look bool) string {
	remarked := s.root.Remarks(serviceInstance(s.scope, s.Name), strconv.Itoa(key.Slot))
	late, isLate := strings.CutPrefix(remarked, lateMark)
	if !look {
		return late
	}
	m := *s.pub.Service.Member(key.Slot)
	_, err := s.pub.find(ctx, key, m)
	switch {
	case err != nil:
		return strings.ToValidUTF8(err.Error(), "?")
	case isLate:
		return late
	}
	return "all its sockets are there: a running weir serve admits it, or weir apply"
}

// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/explain"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// applyNotes applies the configuration. It returns the notes foreseen by a dry run and the notes of the steps.
func (w *world) applyNotes() (foreseen, noted string) {
	w.t.Helper()
	plan := func() feature.Plan {
		st, err := state.Read(w.t.Context(), w.root)
		if err != nil {
			w.t.Fatal(err)
		}
		p, err := Feature{}.Plan(w.t.Context(), st, w.cfg)
		if err != nil {
			w.t.Fatal(err)
		}
		return p
	}
	for _, s := range plan().Steps {
		if s.Foresee != nil {
			foreseen += s.Foresee(w.t.Context())
		}
	}
	w.locked(func(l *kernel.WriteLock) error {
		return plan().Apply(w.t.Context(), l, func(_ feature.Step, note string) { noted += note })
	})
	return foreseen, noted
}

func writePID(t *testing.T, file string, s *sink) {
	t.Helper()
	if err := os.WriteFile(file, []byte(strconv.Itoa(s.pid())), 0o600); err != nil {
		t.Fatal(err)
	}
}

// has returns an error unless a process has a slot.
func (w *world) has(slot, pid int) error {
	if s := w.state().Slots[slot]; !s.Admitted() || s.PID != pid {
		return notGiven{w, slot, pid}
	}
	return nil
}

// TestFormerSocketsServe: a member keeps its slot without a socket at its changed address. Plan, apply, status and doctor
// name the missing socket. The member gets the slot with its new socket when that appears.
func TestFormerSocketsServe(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	a := startSink(t, "udp4=0.0.0.0:7005", "udp4=0.0.0.0:7006")
	w.member(0, a, "udp 0.0.0.0:7005")
	w.apply()
	was := w.state().Slots[0].Sockets[0].Cookie
	w.member(0, a, "udp 0.0.0.0:7009")
	foreseen, noted := w.applyNotes()
	who := fmt.Sprintf("process %d (", a.pid())
	if !strings.HasPrefix(foreseen, "would stay with "+who) || !strings.HasPrefix(noted, "stays with "+who) || !strings.Contains(noted, "7009") {
		t.Errorf("foreseen %q, noted %q", foreseen, noted)
	}
	if foreseen, noted := w.applyNotes(); foreseen+noted != "" {
		t.Errorf("the second time: foreseen %q, noted %q", foreseen, noted)
	}
	st, err := state.Read(t.Context(), w.root)
	if err != nil {
		t.Fatal(err)
	}
	st.ExplainEmpty(t.Context())
	if slot := st.Services[0].Slots[0]; !slot.Admitted() || slot.Occupant != "" || !strings.HasPrefix(slot.Reason, "its member serves from its former sockets: ") {
		t.Errorf("slot %+v", slot)
	}
	if got := w.found(); !strings.Contains(got, "slot 0: its member serves from its former sockets: ") || !strings.Contains(got, "7009") {
		t.Errorf("doctor %q", got)
	}
	w.member(0, a, "udp 0.0.0.0:7006")
	if foreseen, noted := w.applyNotes(); foreseen+noted != "" {
		t.Errorf("an existing socket: foreseen %q, noted %q", foreseen, noted)
	}
	if slot := w.state().Slots[0]; !slot.Admitted() || slot.Reason != "" || slot.Sockets[0].Cookie == was {
		t.Errorf("with the new socket: %+v", slot)
	}
}

// TestFormerMemberKeepsTheSlot: a slot stays with its process while the newly configured member does not exist. Plan,
// apply, status, explain and doctor name both. The member gets the slot when it appears, unless an operator has given
// it to another process.
func TestFormerMemberKeepsTheSlot(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991")
	a, b, c := startSink(t, "udp4=0.0.0.0:9991"), startSink(t, "udp4=0.0.0.0:9991"), startSink(t, "udp4=0.0.0.0:9991")
	w.member(0, a)
	w.member(1, b)
	w.apply()
	pidfile := filepath.Join(t.TempDir(), "pid")
	for _, m := range []service.Member{{PIDFile: pidfile + "x"}, {Cgroup: "/nowhere"}, {Unit: "nowhere.service"}, {PID: 1 << 21}, {PIDFile: pidfile}} {
		w.cfg.Services[0].Members[0] = m
		foreseen, noted := w.applyNotes()
		who := fmt.Sprintf("process %d (", a.pid())
		if !strings.HasPrefix(foreseen, "would stay with "+who) || !strings.HasPrefix(noted, "stays with "+who) || !strings.Contains(noted, ") until its member is there: ") {
			t.Errorf("%s: foreseen %q, noted %q", m, foreseen, noted)
		}
		st, err := state.Read(t.Context(), w.root)
		if err != nil {
			t.Fatal(err)
		}
		st.ExplainEmpty(t.Context())
		s := &st.Services[0]
		if slot := s.Slots[0]; !slot.Admitted() || !strings.HasPrefix(slot.Occupant, who) || !strings.HasPrefix(slot.Reason, "its member is missing: ") {
			t.Errorf("%s: slot %+v", m, slot)
		}
		if slot := s.Slots[1]; slot.Occupant != "" || slot.Reason != "" {
			t.Errorf("%s: the other slot: %+v", m, slot)
		}
		if got := explain.MemberText(w.state(), w.state().Slots[0]); !strings.Contains(got, who) || !strings.Contains(got, "in place of "+m.String()) {
			t.Errorf("%s: explain %q", m, got)
		}
		if got := w.found(); !strings.Contains(got, "slot 0 has "+who) || !strings.Contains(got, "configured member is "+m.String()) {
			t.Errorf("%s: doctor %q", m, got)
		}
	}
	w.serve()
	writePID(t, pidfile, c)
	w.admitted(0, c.pid())
	if st := w.state(); st.Occupant(st.Slots[0]) != "" {
		t.Errorf("its member has come: %q", st.Occupant(st.Slots[0]))
	}
	later := pidfile + "later"
	w.cfg.Services[0].Members[0] = service.Member{PIDFile: later}
	w.apply()
	if _, err := engine.Admit(t.Context(), w.root, w.slot(0), &service.Member{PID: a.pid()}); err != nil {
		t.Fatal(err)
	}
	writePID(t, later, c)
	nstest.Steadily(t, 3*lookEvery, func() error { return w.has(0, a.pid()) })
}

// A command may change a slot after weir serve has found its member, while weir serve waits for the lock. The command's
// change stays.
func TestCommandBeforeAdmission(t *testing.T) {
	for name, command := range map[string]func(w *world, l *kernel.WriteLock, other *sink) error{
		"other process admitted": func(w *world, l *kernel.WriteLock, other *sink) error {
			_, err := engine.AdmitLocked(t.Context(), l, w.slot(0), &service.Member{PID: other.pid()}, nil)
			engine.Remark(w.root, w.slot(0), nil)
			return err
		},
		"withdrawn": func(w *world, l *kernel.WriteLock, _ *sink) error { return engine.Withdraw(l, w.slot(0)) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
			former, other, member := startSink(t, "udp4=0.0.0.0:9991"), startSink(t, "udp4=0.0.0.0:9991"), startSink(t, "udp4=0.0.0.0:9991")
			w.member(0, former)
			w.apply()
			w.cfg.Services[0].Members = nil
			write := w.byPIDFile(0)
			w.apply()
			w.serve()
			var pid int
			w.locked(func(l *kernel.WriteLock) error {
				write(member)
				time.Sleep(2 * lookEvery) // weir serve finds the member, and waits
				err := command(w, l, other)
				pid = w.state().Slots[0].PID
				return err
			})
			withdrawn := w.state().Slots[0].Withdrawn
			nstest.Steadily(t, 2*lookEvery, func() error {
				if s := w.state().Slots[0]; s.PID != pid || s.Withdrawn != withdrawn || s.PID == member.pid() {
					return fmt.Errorf("%s: the slot is %+v", name, s)
				}
				return nil
			})
		})
	}
}

// TestIdleSlot: with keep, the sockets of an exited process keep its slot, for example in socket activation. Log, status
// and doctor take this for the normal state. Closed sockets are named by their bound addresses.
func TestIdleSlot(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp4 0.0.0.0:9991")
	bound, err := service.ParseListen("udp4 0.0.0.0:9981")
	if err != nil {
		t.Fatal(err)
	}
	write := w.byPIDFile(0)
	m := &w.cfg.Services[0].Members[0]
	m.Keep, m.Bound = true, []service.Listen{bound}
	w.apply()
	log := w.serveLog()
	a := startSink(t, "udp4=0.0.0.0:9981")
	write(a)
	w.admitted(0, a.pid())
	a.do("orphan")
	a.kill()
	nstest.Eventually(t, func() error {
		if text := log.String(); !strings.Contains(text, "level=INFO msg=\"process exited, its sockets keep the slot\" service=svc slot=0 pid="+strconv.Itoa(a.pid())) {
			return fmt.Errorf("log %s", text)
		}
		return nil
	})
	s := w.state()
	s.ExplainEmpty(t.Context(), time.Now().Add(time.Second))
	if slot := s.Slots[0]; !slot.Admitted() || !slot.Idle || slot.Reason != "" || slot.Occupant != "" {
		t.Errorf("slot %+v", slot)
	}
	if got := w.found(); strings.Contains(got, "slot 0") {
		t.Errorf("doctor %q", got)
	}
	if strings.Contains(log.String(), "level=WARN") {
		t.Errorf("log %s", log.String())
	}
	a.endOrphan()
	want := fmt.Sprintf("process %d closed udp4 :9981", a.pid())
	nstest.Eventually(t, func() error {
		if slot := w.state().Slots[0]; slot.Admitted() || slot.Idle || slot.Reason != want {
			return fmt.Errorf("slot %+v, want %q", slot, want)
		}
		return nil
	})
}

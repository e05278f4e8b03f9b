// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// readyWhen returns a check that passes once a file exists, and records each run.
func readyWhen(dir string) *service.Ready {
	return &service.Ready{Command: []string{"/bin/sh", "-c", `echo "$WEIR_PID $WEIR_SLOT" >>"$1/runs"; test -e "$1/ready"`, "sh", dir},
		Interval: 10 * time.Millisecond, Timeout: time.Minute}
}

func touch(t *testing.T, file string) {
	t.Helper()
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
}

func (w *world) slot(n int) slots.Slot {
	return slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: n}
}

// TestWatcherAsksWhetherReady: a member with a failing check is not admitted, and a hanging check delays no other slot.
func TestWatcherAsksWhetherReady(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	dir := t.TempDir()
	a, b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"), startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.member(1, b)
	w.cfg.Services[0].Members[0].Ready = readyWhen(dir)
	hung := readyWhen(dir)
	hung.Command = []string{"/bin/sh", "-c", `test -e "$1/unhung" || sleep 1000`, "sh", dir}
	hung.Timeout = 100 * time.Millisecond
	w.cfg.Services[0].Members[1].Ready = hung
	w.apply()
	if st := w.state(); st.Slots[0].Admitted() || !strings.Contains(st.Slots[0].Reason, "was never ready with all its sockets") {
		t.Errorf("not ready, slot 0 is %+v", st.Slots[0])
	}
	w.serve()
	touch(t, dir+"/ready")
	w.admitted(0, a.pid())
	if w.state().Slots[1].Admitted() {
		t.Error("admitted though its check hangs")
	}
	runs, err := os.ReadFile(dir + "/runs")
	if first, _, _ := strings.Cut(string(runs), "\n"); err != nil || first != fmt.Sprint(a.pid(), " 0") {
		t.Errorf("the check was told %q, %v", first, err)
	}
	touch(t, dir+"/unhung")
	w.admitted(1, b.pid())
	w.check(sources(6), loopback4, names(a, b))
	// A serving member is not checked again, not even by a change of the service.
	if err := os.Remove(dir + "/ready"); err != nil {
		t.Fatal(err)
	}
	more, err := service.ParseListen("udp 0.0.0.0:9992")
	if err != nil {
		t.Fatal(err)
	}
	a.do("open udp4=0.0.0.0:9992")
	b.do("open udp4=0.0.0.0:9992")
	w.cfg.Services[0].Listen = append(w.cfg.Services[0].Listen, more)
	w.apply()
	if !w.state().Slots[0].Admitted() {
		t.Errorf("after a change of listens slot 0 is %+v", w.state().Slots[0])
	}
}

// TestRegisterAsksWhetherReady: apply runs the check once and briefly, and register waits for it.
func TestRegisterAsksWhetherReady(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	dir := t.TempDir()
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.cfg.Services[0].Members[0].Ready = readyWhen(dir)
	w.apply()
	if _, err := engine.Admit(t.Context(), w.root, w.slot(0), nil); !errors.Is(err, service.ErrNotReady) || !engine.Waiting(err) {
		t.Errorf("admitting it: %v", err)
	}
	_, err := engine.AdmitWithin(t.Context(), w.root, w.slot(0), nil, 50*time.Millisecond)
	if err == nil || !strings.HasPrefix(err.Error(), "slot 0 of svc stays empty after 50ms: not ready: /bin/sh: exit status 1") {
		t.Errorf("waiting for it: %v", err)
	}
	began := time.Now()
	hung := &service.Member{PID: a.pid(), Ready: &service.Ready{Command: []string{"sleep", "1000"}, Timeout: time.Minute}}
	w.locked(func(l *kernel.WriteLock) error {
		if _, err := engine.AdmitLocked(t.Context(), l, w.slot(0), hung, nil); !errors.Is(err, service.ErrNotReady) {
			t.Errorf("with the lock held: %v", err)
		}
		return nil
	})
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the lock was held for %s", took)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := engine.AdmitWithin(t.Context(), w.root, w.slot(0), nil, time.Minute)
		waiting <- err
	}()
	runs := func() string { text, _ := os.ReadFile(filepath.Join(dir, "runs")); return string(text) }
	before := runs()
	nstest.Until(t, "the check of the waiting admission", func() bool { return runs() != before })
	w.locked(func(l *kernel.WriteLock) error { return engine.Withdraw(l, w.slot(0)) })
	touch(t, filepath.Join(dir, "ready"))
	if err := <-waiting; err == nil || !strings.Contains(err.Error(), "slot 0 of svc was withdrawn meanwhile") {
		t.Errorf("withdrawn during its check: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "ready")); err != nil {
		t.Fatal(err)
	}
	go func() { time.Sleep(50 * time.Millisecond); os.WriteFile(filepath.Join(dir, "ready"), nil, 0o644) }()
	if changed, err := engine.AdmitWithin(t.Context(), w.root, w.slot(0), nil, time.Minute); err != nil || !changed {
		t.Errorf("ready: %v, %v", changed, err)
	}
	w.check(sources(3), loopback4, names(a))
	if changed, err := engine.Admit(t.Context(), w.root, w.slot(0), nil); err != nil || changed {
		t.Errorf("once more: %v, %v", changed, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := engine.AdmitWithin(ended, w.root, w.slot(0), &service.Member{PID: 1 << 22}, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("ended from outside: %v", err)
	}
}

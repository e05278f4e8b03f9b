// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
	svc "github.com/weir-project/weir/service"
)

// beforeChange is the state before a change to be confirmed: slot 1's member was admitted by hand.
const beforeChange = `
services:
  telemetry:
    listen: [udp 0.0.0.0:4739, tcp 0.0.0.0:4739]
    steer: {slots: 3, weights: {0: 2}}
    members: [{slot: 0, pid: %[1]d}]
    guard: {limit: 20kpps}
  goes: {listen: [udp 0.0.0.0:2055, tcp 0.0.0.0:2055], steer: {slots: 1}, members: [{slot: 0, pid: %[1]d}]}
handoff: {keeper: {hold: 700ms, grace: 100ms}}
`

const afterChange = `
services:
  telemetry:
    listen: [udp 0.0.0.0:4739]
    steer: {slots: 2, seed: 7}
    guard: {limit: 1kpps}
  comes: {listen: [udp 0.0.0.0:6343], steer: {slots: 1}}
`

// playConfirm applies a file to be confirmed, or rolls the change back, and is killed at a step, counted from 0: ROOT
// FILE STEP.
func playConfirm(f []string) error {
	h := New(f[0])
	kerneltest.DieAt(f[2])
	if f[1] == "rollback" {
		return h.Rollback(context.Background(), func(Done) {})
	}
	c, err := LoadConfig(f[1])
	if err != nil {
		return err
	}
	c.AllowOutage, c.Confirm = true, time.Hour
	return h.Apply(context.Background(), c, func(Done) {})
}

// playWatch rolls a change back after its deadline: ROOT ID.
func playWatch(f []string) error {
	return New(f[0]).Watch(context.Background(), f[1], func() { fmt.Println("watching") })
}

// saved returns the whole state restored by a rollback, except positions in maps.
func (w world) saved() string {
	w.t.Helper()
	all, err := w.save(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	var v any
	for _, text := range []string{"steer", "guard"} {
		if err := json.Unmarshal(all[text], &v); err != nil {
			w.t.Fatal(err)
		}
		b, _ := json.Marshal(without(v, "id", "rows", "spare", "engine_reason", "engine", "index"))
		all[text] = b
	}
	b, err := json.MarshalIndent(all, "", " ")
	if err != nil {
		w.t.Fatal(err)
	}
	return string(b)
}

func without(v any, keys ...string) any {
	switch v := v.(type) {
	case map[string]any:
		for _, k := range keys {
			delete(v, k)
		}
		for k := range v {
			v[k] = without(v[k], keys...)
		}
	case []any:
		for i := range v {
			v[i] = without(v[i], keys...)
		}
	}
	return v
}

// confirmWorld returns a host with the state before the change, and the file of the change.
func confirmWorld(t *testing.T) (w world, before *Config, file string) {
	w = newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739", "0.0.0.0:2055")
	hand, _ := daemon(t, "0.0.0.0:4739")
	before = w.config(beforeChange, pid)
	before.AllowOutage = true
	w.apply(before)
	w.admit("telemetry", 1, hand)
	w.drain("telemetry", 2)
	file = filepath.Join(t.TempDir(), "after.yaml")
	if err := os.WriteFile(file, []byte(afterChange), 0o600); err != nil {
		t.Fatal(err)
	}
	return w, before, file
}

func (w world) after(window time.Duration) *Config {
	c := w.config("%s", afterChange)
	c.AllowOutage, c.Confirm = true, window
	return c
}

// wantBefore checks that everything is as before, and works.
func (w world) wantBefore(when, before string) {
	w.t.Helper()
	if now := w.saved(); now != before {
		w.t.Errorf("%s: the state is not what it was:\n%s", when, diff(before, now))
	}
	for port, want := range map[int]string{4739: "telemetry", 2055: "goes", 6343: ""} {
		if got := w.handled(port, want); got != want {
			w.t.Errorf("%s: port %d is counted by %q, want %q", when, port, got, want)
		}
	}
}

// diff returns the lines of only one of two texts.
func diff(a, b string) string {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	var out []string
	for _, line := range x {
		if !slices.Contains(y, line) {
			out = append(out, "- "+line)
		}
	}
	for _, line := range y {
		if !slices.Contains(x, line) {
			out = append(out, "+ "+line)
		}
	}
	return fmt.Sprintf("%.4000s", strings.Join(out, "\n"))
}

// The process left behind by the command rolls a change back, with seed, weights, table, members and limits.
func TestUnconfirmedIsTakenBack(t *testing.T) {
	w, before, _ := confirmWorld(t)
	WatchCommand = func(root, id string) *exec.Cmd { return child("watch", root, id) }
	defer func() { WatchCommand = nil }()
	was := w.saved()
	if steps := w.apply(w.after(300 * time.Millisecond)); len(steps) < 4 { // on a slow machine it is rolled back already
		t.Fatalf("the change did %q", steps)
	}
	w.takenBack()
	w.wantBefore("taken back", was)
	if err := w.Confirm(t.Context()); !errors.Is(err, errNoChange) || !strings.Contains(err.Error(), "was rolled back at") {
		t.Errorf("confirmed too late: %v", err)
	}
	wantSteps(t, w.apply(before))
	// Confirmed in time, it stays.
	w.apply(w.after(time.Hour))
	if err := w.Confirm(t.Context()); err != nil {
		t.Fatal(err)
	}
	if u, err := w.Unconfirmed(); u != nil || err != nil {
		t.Errorf("confirmed, and there is %+v, %v", u, err)
	}
	if err := w.Rollback(t.Context(), func(Done) {}); !errors.Is(err, errNoChange) {
		t.Errorf("rollback of a confirmed change: %v", err)
	}
	if s, err := w.state().Service("telemetry"); err != nil || s.Seed != 7 {
		t.Errorf("confirmed, and the service is %+v, %v", s, err)
	}
}

// takenBack waits until the change was rolled back.
func (w world) takenBack() {
	w.t.Helper()
	nstest.Until(w.t, "the change is taken back", func() bool {
		u, err := w.Unconfirmed()
		if err != nil || u == nil || u.Problem != "" {
			w.t.Fatalf("the change is %+v, %v", u, err)
		}
		return !u.RolledBack.IsZero()
	})
}

// An apply to be confirmed is rolled back after a kill at any step, and also after a kill of its rollback.
func TestKilledUnconfirmedIsTakenBack(t *testing.T) {
	w, _, file := confirmWorld(t)
	was := w.saved()
	every := nstest.Stride(10)
	seen := map[string]bool{}
	killed := func(what string, n int) (step string) {
		step = kerneltest.Killed(w.t, child("confirm", w.Root.Path(), what, n))
		seen[step] = true
		return step
	}
	for n := rand.IntN(every); ; n += every {
		step := killed(file, n)
		if step == "" {
			break
		}
		u, err := w.Unconfirmed()
		if err != nil {
			t.Fatal(err)
		}
		if u == nil { // before anything was kept
			w.wantBefore("killed at "+step, was)
			continue
		}
		w.rollback()
		w.wantBefore(fmt.Sprintf("applying was killed at step %d (%s)", n, step), was)
	}
	w.rollback() // of the apply that ran to its end
	for n := rand.IntN(every); ; n += every {
		w.apply(w.after(time.Hour))
		step := killed("rollback", n)
		if step == "" {
			break
		}
		w.rollback()
		w.wantBefore(fmt.Sprintf("taking back was killed at step %d (%s)", n, step), was)
	}
	t.Logf("killed at %d kinds of steps", len(seen))
}

// rollback rolls the change back, unless another process has.
func (w world) rollback() {
	w.t.Helper()
	u, err := w.Unconfirmed()
	if err == nil && u.Waits() {
		err = w.Rollback(w.t.Context(), func(Done) {})
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// A rollback by an operator is not reported as a missed confirmation.
func TestRollbackByCommandIsTold(t *testing.T) {
	w, _, _ := confirmWorld(t)
	w.apply(w.after(time.Hour))
	w.rollback()
	u, err := w.Unconfirmed()
	if err != nil || u == nil {
		t.Fatal(u, err)
	}
	if f := u.Finding(); !strings.HasSuffix(f.Text, "by weir rollback") || strings.Contains(f.Remedy, "confirm") {
		t.Errorf("rolled back, and told is %+v", f)
	}
	w.apply(w.after(time.Millisecond))
	nstest.Until(t, "its time is over", func() bool {
		u, err := w.Unconfirmed()
		return err == nil && u.Left <= 0
	})
	w.rollback()
	if u, err := w.Unconfirmed(); err != nil || !strings.Contains(u.Finding().Text, "not confirmed within") {
		t.Errorf("its time was over, and told is %+v, %v", u, err)
	}
}

// While one change waits, a second one is rejected unless it is to be confirmed too. Then both are rolled back.
func TestSecondApplyWhileUnconfirmed(t *testing.T) {
	w, before, _ := confirmWorld(t)
	was := w.saved()
	w.apply(w.after(time.Hour))
	err := w.Apply(t.Context(), before, func(d Done) { t.Errorf("did %s", d.Step) })
	if !errors.Is(err, errUnconfirmed) || !strings.Contains(err.Error(), "weir rollback") {
		t.Errorf("a second apply: %v", err)
	}
	same := w.after(0)
	if err := w.Apply(t.Context(), same, func(d Done) { t.Errorf("did %s", d.Step) }); err != nil {
		t.Errorf("applying what is in force: %v", err)
	}
	second := w.config("%s", strings.Replace(afterChange, "seed: 7", "seed: 8", 1))
	second.Confirm = time.Hour
	w.apply(second)
	st, err := w.Reader("/nonexistent").Status(t.Context())
	if err != nil || !st.Unconfirmed.Waits() || st.Unconfirmed.Left < 50*time.Minute {
		t.Errorf("status: %+v, %v", st.Unconfirmed, err)
	}
	// A failed one leaves the deadline and the state unchanged.
	deadline, now := st.Unconfirmed.Deadline, w.saved()
	kerneltest.OnTry(func(step string) error {
		if step == "steer:published" {
			return errors.New("planned failure")
		}
		return nil
	})
	third := w.config("%s", strings.Replace(afterChange, "seed: 7", "seed: 9", 1))
	third.Confirm = 2 * time.Hour
	err = w.Apply(t.Context(), third, func(Done) {})
	kerneltest.OnTry(nil)
	if err == nil || w.saved() != now {
		t.Errorf("a failed apply: %v\n%s", err, diff(now, w.saved()))
	}
	if u, err := w.Unconfirmed(); err != nil || u == nil || u.Deadline != deadline {
		t.Errorf("after a failed apply the change is %+v, %v", u, err)
	}
	w.rollback()
	w.wantBefore("taken back", was)
}

// A damaged change is shown with its file. Nothing confirms or rolls it back, and weir apply removes it.
func TestDamagedChange(t *testing.T) {
	w, before, _ := confirmWorld(t)
	w.apply(w.after(time.Hour))
	path := w.Root.KeptPath(keptChange)
	if err := os.WriteFile(path, []byte(`{"since": "not a time"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	st, err := w.Reader("/nonexistent").Status(t.Context())
	if err != nil || st.Unconfirmed == nil || !strings.Contains(st.Unconfirmed.Finding().Text, path) || len(st.parts) == 0 {
		t.Errorf("status: %+v, %v", st.Unconfirmed, err)
	}
	for verb, err := range map[string]error{"confirm": w.Confirm(t.Context()), "rollback": w.Rollback(t.Context(), func(Done) {})} {
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "weir apply") {
			t.Errorf("%s: %v", verb, err)
		}
	}
	w.apply(before)
	if u, err := w.Unconfirmed(); err != nil || u != nil {
		t.Errorf("after apply: %+v, %v", u, err)
	}
}

// The saved state has the prefixes of lists, so it can be larger than every other file beside the pins.
func TestRollbackOfLargeState(t *testing.T) {
	w, _, _ := confirmWorld(t)
	was := w.saved()
	w.apply(w.after(time.Hour))
	path := w.Root.KeptPath(keptBefore)
	text, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, append(bytes.Repeat([]byte(" "), 80<<20), text...), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	w.rollback()
	w.wantBefore("rolled back", was)
}

// The owner of the records may make the saved state huge. It costs a command of root the parts that it needs, and no
// small text becomes a huge value.
func TestHugeSavedState(t *testing.T) {
	w, before, _ := confirmWorld(t)
	was := w.saved()
	path := w.Root.KeptPath(keptBefore)
	const huge = 100 << 20
	grow := func(member string) {
		t.Helper()
		text, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(path, append([]byte("{"+member+","), text[1:]...), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	cheap := func(what string, do func()) {
		t.Helper()
		var from, to runtime.MemStats
		runtime.ReadMemStats(&from)
		do()
		runtime.ReadMemStats(&to)
		if used := to.TotalAlloc - from.TotalAlloc; used > huge/2 {
			t.Errorf("%s allocated %d MiB over a saved state of %d MiB", what, used>>20, huge>>20)
		}
	}
	w.apply(w.after(time.Hour))
	grow(`"zz":["` + strings.Repeat("a", huge) + `"]`)
	cheap("weir remove reroute", func() {
		if err := w.Remove(t.Context(), "reroute", true); err != nil {
			t.Error(err)
		}
	})
	if st, err := os.Stat(path); err != nil || st.Size() < huge {
		t.Errorf("weir remove reroute left %v, %v", st, err)
	}
	cheap("weir rollback", w.rollback)
	w.wantBefore("rolled back", was)

	w.apply(before)
	w.apply(w.after(time.Hour))
	for _, f := range []string{"filter", "guard"} {
		text, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(path, bytes.Replace(text, []byte(`"`+f+`":`), []byte(`"`+f+`":[`+strings.Repeat("null,", 3<<20)+`null],"was `+f+`":`), 1), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	cheap("weir rollback of many values", func() {
		err := w.Rollback(t.Context(), func(Done) {})
		for _, part := range []string{"filter: ", "guard: ", path, "more than", "weir confirm"} {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("rollback of many values: %v, without %q", err, part)
			}
		}
	})
	if err := w.Confirm(t.Context()); err != nil {
		t.Error(err)
	}
}

// Later changes by operators stay, and removed objects are not restored.
func TestTakeBackKeepsLaterWords(t *testing.T) {
	w, _, _ := confirmWorld(t)
	w.apply(w.after(time.Hour))
	w.drain("telemetry", 0)
	w.rollback()
	s, err := w.state().Service("telemetry")
	if err != nil || !reflect.DeepEqual(s.Drained, []int{0, 2}) || s.Slots[0].Buckets != 0 || s.Slots[1].Buckets != 4096 {
		t.Errorf("drained meanwhile, and the service is %+v, %v", s, err)
	}
	w.apply(w.after(time.Hour))
	if err := w.Remove(t.Context(), "steer", true); err != nil {
		t.Fatal(err)
	}
	w.rollback()
	if n := len(w.state().Services); n != 0 {
		t.Errorf("removed, and %d services came back", n)
	}
	if l := w.saved(); !strings.Contains(l, "700000000") {
		t.Errorf("the limits of handoff were not taken back:\n%s", l)
	}
}

// weir serve rolls a change back, and so does the next apply, without other processes.
func TestOthersTakeBack(t *testing.T) {
	w, before, _ := confirmWorld(t)
	was := w.saved()
	w.apply(w.after(time.Millisecond))
	if d := w.Doctor(t.Context()); !strings.Contains(fmt.Sprint(d.Findings), "its rollback is overdue") {
		t.Errorf("doctor does not tell: %+v", d.Findings)
	}
	if steps := w.apply(before); !strings.HasPrefix(steps[0], "create service goes") {
		t.Errorf("the next apply did %q", steps)
	}
	w.wantBefore("taken back by apply", was)
	w.apply(w.after(time.Millisecond))
	s := w.serve()
	w.takenBack()
	told := func(by string) {
		t.Helper()
		nstest.Until(t, "weir serve tells of the change that was taken back", func() bool { return s.log.Has("unconfirmed change rolled back", by) })
	}
	told(`by=timeout`)
	w.wantBefore("taken back by serve", was)
	w.apply(w.after(time.Hour))
	if _, body := s.get("/metrics"); !strings.Contains(body, "weir_unconfirmed_left_seconds 3") {
		t.Error("no metric of the change")
	}
	w.rollback()
	told(`by="weir rollback"`)
}

// admit gives a slot to a process, like weir steer admit.
func (w world) admit(service string, slot, pid int) {
	w.t.Helper()
	w.change(service, slot, func(l *kernel.WriteLock, s slots.Slot) error {
		_, err := engine.AdmitLocked(w.t.Context(), l, s, &svc.Member{Slot: slot, PID: pid}, nil)
		return err
	})
}

func (w world) drain(service string, slot int) {
	w.t.Helper()
	w.change(service, slot, func(l *kernel.WriteLock, s slots.Slot) error { return engine.Drain(l, s, nil) })
}

func (w world) change(service string, slot int, f func(*kernel.WriteLock, slots.Slot) error) {
	w.t.Helper()
	s, err := w.state().Service(service)
	if err != nil {
		w.t.Fatal(err)
	}
	l, err := w.Root.Lock(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	defer l.Unlock()
	if err := f(l, slots.Slot{Scope: s.Scope(), Service: service, Slot: slot}); err != nil {
		w.t.Fatal(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

const oneService = `
services:
  telemetry:
    listen: [udp 0.0.0.0:4739, tcp 0.0.0.0:4739]
    steer: {slots: 2}
    members: [{slot: 0, pid: %d}]
`

const twoServices = oneService + `
  flows:
    listen: [udp 0.0.0.0:2055]
    steer: {slots: 1}
`

func same(t *testing.T, what string, before, after []string) {
	t.Helper()
	if !slices.Equal(before, after) {
		t.Errorf("%s changed the pins from\n%s\nto\n%s", what, strings.Join(before, "\n"), strings.Join(after, "\n"))
	}
}

func wantSteps(t *testing.T, got []string, want ...string) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("steps:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		return
	}
	for i := range got {
		if !strings.HasPrefix(got[i], want[i]) {
			t.Errorf("step %d: %q, want %q", i, got[i], want[i])
		}
	}
}

func TestPlanChangesNothing(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	c := w.config(twoServices, pid)
	want := []string{"create service flows: 1 slot by source on udp 0.0.0.0:2055, in ",
		"create service telemetry: 2 slots by source on udp 0.0.0.0:4739, tcp 0.0.0.0:4739, in ",
		fmt.Sprintf("adopt slot 0 of service telemetry: pid %d", pid)}
	wantSteps(t, w.plan(c), want...)
	if left := w.dump(); len(left) != 0 {
		t.Errorf("a plan made %v", left)
	}
	wantSteps(t, w.apply(c), want...) // the planned steps
	before := w.dump()
	wantSteps(t, w.plan(w.config(oneService, pid)), "remove service flows")
	wantSteps(t, w.plan(w.config("services: {}")), "remove service flows", "remove service telemetry")
	wantSteps(t, w.plan(w.config(strings.Replace(twoServices, "slots: 2", "slots: 3, on_empty: next", 1), pid)),
		"change service telemetry: slots 2 → 3; on_empty reject → next")
	same(t, "planning", before, w.dump())
}

func TestApplyTwice(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	c := w.config(twoServices, pid)
	w.apply(c)
	st := w.state()
	if s, err := st.Service("telemetry"); err != nil || !s.Slots[0].Admitted() || s.Slots[0].PID != pid || s.Slots[1].Admitted() {
		t.Errorf("applied, and the state is %+v, %v", s, err)
	}
	before := w.dump()
	slots := shown(st.Services[1].Slots)
	wantSteps(t, w.plan(c))
	wantSteps(t, w.apply(c))
	same(t, "applying again", before, w.dump())
	if again := shown(w.state().Services[1].Slots); again != slots {
		t.Errorf("applying again changed the slots from\n%s\nto\n%s", slots, again)
	}
	// A file with the same meaning changes nothing either.
	wantSteps(t, w.apply(w.config(strings.Replace(twoServices, "{slots: 2}", "{slots: 2, by: source, on_empty: reject, backlog: 1024}", 1), pid)))
	same(t, "applying the same in other words", before, w.dump())
}

func TestApplyRemoves(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	w.apply(w.config(twoServices, pid))
	has := func(name string) bool {
		return slices.ContainsFunc(w.dump(), func(s string) bool { return strings.Contains(s, "/steer/"+name+" ") })
	}
	if !has("flows") || !has("telemetry") {
		t.Fatal("no pins of the services")
	}
	wantSteps(t, w.apply(w.config(oneService, pid)), "remove service flows")
	if has("flows") || !has("telemetry") {
		t.Errorf("after its removal flows has pins: %v, telemetry: %v", has("flows"), has("telemetry"))
	}
	if s := w.state().Services; len(s) != 1 || !s[0].Slots[0].Admitted() {
		t.Errorf("the other service is %+v", s)
	}
	wantSteps(t, w.apply(w.config("services: {}")), "remove service telemetry")
	if left := w.dump(); len(left) != 0 {
		t.Errorf("the last service went, and there is still\n%s", strings.Join(left, "\n"))
	}
	wantSteps(t, w.apply(w.config("services: {}")))
}

func TestRemove(t *testing.T) {
	for _, feature := range []string{"", "steer"} {
		w := newWorld(t)
		w.apply(w.config(twoServices, absent))
		if err := w.Remove(t.Context(), "steering", true); err == nil || !strings.Contains(err.Error(), `no feature "steering": want one of steer`) {
			t.Errorf("an unknown feature: %v", err)
		}
		if len(w.state().Services) != 2 {
			t.Error("services went with an unknown feature")
		}
		if err := w.Remove(t.Context(), feature, true); err != nil {
			t.Error(err)
		}
		if left := w.dump(); len(left) != 0 {
			t.Errorf("removed %q, and there is still\n%s", feature, strings.Join(left, "\n"))
		}
		if err := w.Remove(t.Context(), feature, true); err != nil {
			t.Errorf("removing nothing: %v", err)
		}
	}
}

// Errors of a configuration are found before any change.
func TestErrorsChangeNothing(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	w.apply(w.config(twoServices, pid))
	before := w.dump()
	for _, text := range []string{
		"group: weir-no-such-group\n" + oneService,
		strings.Replace(oneService, "listen:", "netns: weir-no-such\n    listen:", 1),
		// Two names of one namespace.
		strings.Replace(twoServices, "listen: [udp 0.0.0.0:2055]", "netns: pid:%[1]d\n    listen: [udp 0.0.0.0:4739]", 1),
	} {
		c := w.config(text, pid)
		_, planErr := w.Plan(t.Context(), c)
		err := w.Apply(t.Context(), c, func(d Done) { t.Errorf("did %s", d.Step) })
		if err == nil || planErr == nil {
			t.Errorf("applied %s: %v, %v", text, err, planErr)
		}
		same(t, fmt.Sprintf("a config with an error (%v)", err), before, w.dump())
	}
}

// A member that does not run, or lacks sockets, does not prevent an apply.
func TestApplyWithoutMembers(t *testing.T) {
	w := newWorld(t)
	pid, end := daemon(t, "0.0.0.0:4739")
	end()
	c := w.config(oneService, pid)
	steps := w.apply(c)
	wantSteps(t, steps, "create service telemetry", fmt.Sprintf("adopt slot 0 of service telemetry: pid %d (stays empty: not running: process %d has exited)", pid, pid))
	before := w.dump()
	w.apply(c)
	same(t, "looking for the member again", before, w.dump())
	if s := w.state().Services[0].Slots[0]; s.Admitted() || s.Reason == "" {
		t.Errorf("slot is %+v", s)
	}
}

// withGroups gives the test its own /etc with these lines in group.
func withGroups(t *testing.T, lines ...string) {
	t.Helper()
	nstest.NeedRoot(t)
	if err := os.MkdirAll("/etc", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", "/etc", "tmpfs", 0, "mode=0755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/etc", unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if lines != nil {
		if err := os.WriteFile("/etc/group", []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestGroupOfPins(t *testing.T) {
	t.Run("groups", func(t *testing.T) {
		withGroups(t, "root:x:0:", "weir:x:4711:", "collectors:x:4712:")
		w := newWorld(t)
		w.apply(w.config(twoServices, absent))
		w.wantGroup(4711)
		wantSteps(t, w.apply(w.config("group: collectors\n"+oneService, absent)), "change readers", "adopt slot 0", "remove service flows")
		w.wantGroup(4712)
		if _, err := w.Plan(t.Context(), w.config("group: nobody-knows\n"+oneService, absent)); err == nil ||
			!strings.HasPrefix(err.Error(), "weir.yaml:1:8: group: ") || !strings.Contains(err.Error(), "groupadd --system nobody-knows") {
			t.Errorf("unknown group: %v", err)
		}
	})
	for name, lines := range map[string][]string{"no group weir": {"root:x:0:"}, "no groups at all": nil} {
		t.Run(name, func(t *testing.T) {
			withGroups(t, lines...)
			w := newWorld(t)
			w.apply(w.config(oneService, absent))
			w.wantGroup(0)
		})
	}
}

// A missing network namespace is named once, with the position of its key.
func TestMissingNetnsIsNamed(t *testing.T) {
	w := newWorld(t)
	for text, want := range map[string]string{
		"services:\n  a:\n    listen: [udp :5300]\n    netns: nosuch\n    steer: {slots: 1}\n":                                    "4:12: services.a: ",
		"services:\n  a:\n    listen: [udp :5300]\n    netns: nosuch\n    guard: {limit: 1kpps}\n":                                "4:12: services.a: ",
		"filter:\n  - name: f\n    netns: nosuch\n    hook: tcx\n    interfaces: [lo]\n    rules: [{match: udp, action: drop}]\n": "3:12: filter.f: ",
		"reroute:\n  - name: r\n    netns: nosuch\n    interface: lo\n    bfd: {peer: 192.0.2.1}\n":                               "3:12: reroute.r: ",
	} {
		_, err := w.Plan(t.Context(), w.config("%s", text))
		if err == nil || !strings.HasPrefix(err.Error(), "weir.yaml:"+want+`netns: network namespace "nosuch": /run/netns/nosuch: file does not exist`) {
			t.Errorf("%s\n%v", text, err)
		}
	}
}

func (w world) wantGroup(gid int) {
	w.t.Helper()
	dump := w.dump()
	if len(dump) < 5 {
		w.t.Errorf("only %d pins", len(dump))
	}
	for _, line := range dump {
		if !strings.Contains(line, fmt.Sprintf(" 0:%d ", gid)) {
			w.t.Errorf("not of group %d: %.80s", gid, line)
		}
	}
}

// The next command recovers a killed command's changes, and plans from there.
func TestApplyMends(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	c := w.config(twoServices, pid)
	w.apply(c)
	before := w.dump()
	scope := w.state().Services[0].Scope()
	for _, left := range []string{"half+new", "gone+old"} {
		if err := os.Mkdir(filepath.Join(w.Root.Path(), scope, "steer", left), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	wantSteps(t, w.apply(c))
	same(t, "recovery", before, w.dump())
	// A service without its engine gets a new one.
	engines, err := filepath.Glob(filepath.Join(w.Root.Path(), scope, "steer", "@*"))
	if err != nil || len(engines) != 1 {
		t.Fatalf("engines %v, %v; want one", engines, err)
	}
	if err := os.RemoveAll(engines[0]); err != nil {
		t.Fatal(err)
	}
	if p := w.state().Services[0].Problem; !strings.Contains(p, "weir apply recovers it") {
		t.Errorf("its engine was removed, and its problem is %q", p)
	}
	w.apply(c)
	if s, err := w.state().Service("telemetry"); err != nil || s.Problem != "" || !s.Slots[0].Admitted() {
		t.Errorf("after the engine was removed and applied again: %+v, %v", s, err)
	}
	wantSteps(t, w.apply(c))
}

// Pins of another version are rejected, not overwritten. Other changes are applied.
func TestApplyRefusesOtherVersions(t *testing.T) {
	w := newWorld(t)
	w.apply(w.config(oneService, absent))
	w.foreign()
	before := w.dump()
	err := w.Apply(t.Context(), w.config(oneService, absent), func(d Done) { t.Errorf("did %s", d.Step) })
	if !errors.Is(err, kernel.ErrABI) {
		t.Errorf("applied over pins of another version: %v", err)
	}
	same(t, "refusing", before, w.dump())
	var did []string
	err = w.Apply(t.Context(), w.config(twoServices, absent), func(d Done) { did = append(did, d.Step.String()) })
	if !errors.Is(err, kernel.ErrABI) || len(did) != 1 || !strings.HasPrefix(did[0], "create service flows") {
		t.Errorf("another service beside pins of another version: did %q, %v", did, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// others are objects in place of a file of the records. Its owner can make them.
var others = map[string]func(path string) error{
	"directory": func(path string) error { return os.MkdirAll(filepath.Join(path, "a", "b"), 0o700) },
	"fifo":      func(path string) error { return syscall.Mkfifo(path, 0o600) },
	"link":      func(path string) error { return os.Symlink("/etc", path) },
}

// Other objects in place of files of the records stop no command, and are removed.
func TestOtherObjectsInPlaceOfRecords(t *testing.T) {
	w, before, _ := confirmWorld(t)
	plant := func(what string, names ...string) {
		t.Helper()
		for _, name := range names {
			path := w.Root.KeptPath(name)
			if err := errors.Join(os.RemoveAll(path), others[what](path)); err != nil {
				t.Fatal(err)
			}
		}
	}
	removed := func(when string, names ...string) {
		t.Helper()
		for _, name := range names {
			if st, err := os.Lstat(w.Root.KeptPath(name)); err == nil && !st.Mode().IsRegular() {
				t.Errorf("%s: %s is still %v", when, name, st.Mode())
			}
		}
	}
	all := []string{keptChange, keptBefore, keptUnderway, keptApplied}
	for what := range others {
		plant(what, all...)
		w.apply(before)
		removed(what+", apply", all...)

		plant(what, all...)
		w.apply(w.after(time.Hour))
		removed(what+", apply --confirm", keptChange, keptBefore, keptApplied)
		plant(what, keptBefore, keptApplied)
		if err := w.Rollback(t.Context(), func(Done) {}); err == nil || !strings.Contains(err.Error(), w.Root.KeptPath(keptBefore)) || !strings.Contains(err.Error(), "weir confirm") {
			t.Errorf("%s, rollback without a saved state: %v", what, err)
		}
		if err := w.Confirm(t.Context()); err != nil {
			t.Errorf("%s, confirm: %v", what, err)
		}
		removed(what+", confirm", keptChange, keptBefore)
		w.apply(before)

		w.apply(w.after(time.Second))
		plant(what, keptBefore)
		nstest.Until(t, "the change is overdue", func() bool { u, err := w.Unconfirmed(); return err == nil && u.Left <= 0 })
		warned := *before
		var warnings []string
		warned.Warned = func(text string) { warnings = append(warnings, text) }
		w.apply(&warned)
		removed(what+", apply without a saved state", all...)
		if text := strings.Join(warnings, "\n"); !strings.Contains(text, w.Root.KeptPath(keptBefore)) {
			t.Errorf("%s, apply without a saved state: warnings %q", what, text)
		}
		if steps := w.plan(before); len(steps) > 0 {
			t.Errorf("%s, apply without a saved state: still to do: %q", what, steps)
		}

		w.apply(w.after(time.Hour))
		plant(what, keptUnderway, keptApplied)
		w.rollback()
		removed(what+", rollback", keptChange, keptBefore, keptApplied)

		plant(what, all...)
		w.remove("")
		removed(what+", remove", keptChange, keptBefore, keptApplied)
		w.apply(before)
	}
}

// A file that cannot be removed after a completed change gives a warning with its path, and no failure.
func TestRecordsThatStay(t *testing.T) {
	w, before, _ := confirmWorld(t)
	var warnings []string
	w.Warned = func(text string) { warnings = append(warnings, text) }
	stay := func(name string) (end func()) {
		t.Helper()
		path := w.Root.KeptPath(name)
		if err := errors.Join(os.RemoveAll(path), os.Mkdir(path, 0o700), unix.Mount("none", path, "tmpfs", 0, "")); err != nil {
			t.Fatal(err)
		}
		end = func() { _ = unix.Unmount(path, unix.MNT_DETACH) }
		t.Cleanup(end)
		return end
	}
	want := func(what, done, name string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if path, got := w.Root.KeptPath(name), strings.Join(warnings, "\n"); !strings.Contains(got, done+", but remove "+path+": ") || !strings.Contains(got, "rm -r '"+path+"'") {
			t.Errorf("%s: warnings %q", what, got)
		}
		warnings = nil
	}
	end := stay(keptChange)
	want("apply", "the unreadable change is ignored", keptChange, w.Apply(t.Context(), before, func(Done) {}))
	end()
	w.apply(before)
	w.apply(w.after(time.Hour))
	end = stay(keptBefore)
	want("confirm", "the change is confirmed", keptBefore, w.Confirm(t.Context()))
	end()
	w.apply(before)
	end = stay(keptChange)
	want("remove", "the removal is done", keptChange, w.Remove(t.Context(), "", true))
	if all, err := w.Root.Instances(""); err != nil || len(all) > 0 {
		t.Errorf("removed, and there is still %v, %v", all, err)
	}
	end()
}

// The owner of the records can write any text. Fields for output are not read from it, and no text begins a line.
func TestTextsInRecords(t *testing.T) {
	w, before, _ := confirmWorld(t)
	was := w.saved()
	edit := func(name string, change func(map[string]any)) {
		t.Helper()
		path, all := w.Root.KeptPath(name), map[string]any{}
		text, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(text, &all)
		}
		change(all)
		if text, merr := json.Marshal(all); errors.Join(err, merr) != nil || os.WriteFile(path, text, 0o600) != nil {
			t.Fatal(err, merr)
		}
	}
	w.apply(w.after(time.Hour))
	edit(keptChange, func(all map[string]any) {
		all["damaged"], all["problem"] = "all is well\n! filter", "why\n! filter"
	})
	u, err := w.Unconfirmed()
	if err != nil || !u.Waits() || strings.Contains(u.Finding().Text, "well") || !strings.Contains(u.Finding().Text, "why; ! filter") {
		t.Errorf("%+v, %v", u, err)
	}
	w.rollback()
	w.wantBefore("rolled back", was)

	w.apply(w.after(time.Hour))
	if err := os.WriteFile(w.Root.KeptPath(keptChange), []byte("{\"since\": \"a\\n! filter\"}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := w.Confirm(t.Context()); err == nil || strings.Contains(err.Error(), "\n") {
		t.Errorf("confirm of an unreadable change: %v", err)
	}
	w.apply(before)

	text, err := json.Marshal(HalfDone{Since: time.Now(), Boot: kernel.BootID(), Damaged: "all is well\n! filter"})
	if err == nil {
		err = os.WriteFile(w.Root.KeptPath(keptUnderway), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	if d, err := w.HalfDone(); err != nil || d == nil || d.Damaged != "" {
		t.Errorf("%+v, %v", d, err)
	}
	w.apply(before)
}

// A link among the pins stops weir apply. weir apply --dry-run says so, too, and both name its path once.
func TestLinkAmongPins(t *testing.T) {
	nstest.NeedRoot(t)
	w := newWorld(t)
	const text = "filter:\n  - {name: %s, hook: tcx, interfaces: [lo], rules: [{match: 'udp.dstport == 9', action: drop}]}\n"
	c, other := w.config(text, "one"), w.config(text, "two")
	w.apply(c)
	all, err := w.Root.Instances("filter")
	if err != nil || len(all) != 1 {
		t.Fatal(all, err)
	}
	for _, pin := range []string{"meta", "map_counts", "map_base"} {
		path := filepath.Join(w.Root.Path(), all[0].Scope, all[0].Feature, all[0].Name, pin)
		if err := errors.Join(os.Rename(path, path+"0"), os.Symlink("/etc/passwd", path)); err != nil {
			t.Fatal(err)
		}
		for _, c := range []*Config{c, other} {
			_, planned := w.Plan(t.Context(), c)
			applied := w.Apply(t.Context(), c, func(Done) {})
			_, opened := w.Root.Open(all[0])
			for what, err := range map[string]error{"dry run": planned, "apply": applied, "open": opened} {
				if err == nil || !strings.Contains(err.Error(), path+": ") || strings.Count(err.Error(), "open ") != 1 || !strings.Contains(err.Error(), "is a symbolic link: remove it") {
					t.Errorf("%s: %s: %v", pin, what, err)
				}
			}
		}
		if err := errors.Join(os.Remove(path), os.Rename(path+"0", path)); err != nil {
			t.Fatal(err)
		}
	}
	if steps := w.plan(c); len(steps) > 0 {
		t.Errorf("without links: %q", steps)
	}
}

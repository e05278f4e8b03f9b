// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/internal/parts"
	"golang.org/x/sys/unix"
)

// publishHere publishes an instance of the current namespace with a program over its map.
func publishHere(t *testing.T, l *WriteLock, change ...func(*Meta)) (Instance, Link) {
	t.Helper()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	m, err := newMap()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	ln, err := NetnsLookup{FD: ns.FD(), Inode: ns.Inode()}.Attach(lookupOver(t, m))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	i := Instance{Scope: strings.Trim(ns.String()[strings.Index(ns.String(), "[")+1:], "])"), Feature: "test", Name: "one"}
	meta := metaOf(1)
	meta.Cookie, _ = ns.Cookie()
	for _, f := range change {
		f(&meta)
	}
	if err := l.Publish(i, meta, Pins{Maps: map[string]*ebpf.Map{"a": m}, Links: map[string]Link{"lookup": ln}}); err != nil {
		t.Fatal(err)
	}
	return i, ln
}

// lookupOver returns an sk_lookup program over a map.
func lookupOver(t *testing.T, m *ebpf.Map) *ebpf.Program {
	t.Helper()
	return over(t, ebpf.SkLookup, ebpf.AttachSkLookup, m)
}

// over returns a program over a map.
func over(t *testing.T, kind ebpf.ProgramType, at ebpf.AttachType, m *ebpf.Map) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "over", Type: kind, AttachType: at, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.LoadMapPtr(asm.R1, m.FD()), asm.Mov.Imm(asm.R0, 1), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// A missing recorded tc filter is reported, and attached again while its program exists.
func TestNotedFilters(t *testing.T) {
	needs(t, ClsactFilter)
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	i, _ := publishHere(t, l)
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	own, err := l.Open(i)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	f, prog := Clsact{Ifindex: lo.Index, Name: "noted"}, over(t, ebpf.SchedCLS, ebpf.AttachNone, own.Maps["a"])
	if err := f.Attach(prog); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Detach(true) })
	l.NoteFilters(i, []Clsact{f})
	wantKinds(t, r, "attached")
	if err := f.Detach(true); err != nil {
		t.Fatal(err)
	}
	wantKinds(t, r, "taken away", "detached")
	if lacks, err := l.Restore(i, anyMap); err != nil || len(lacks) > 0 {
		t.Errorf("restored without %q: %v", lacks, err)
	}
	wantKinds(t, r, "restored")
	theirs := Clsact{Ifindex: lo.Index, Name: "theirs"}
	f.Priority = 2
	if err := errors.Join(f.Detach(true), f.Attach(prog), theirs.Attach(prog)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { theirs.Detach(true) })
	l.NoteFilters(i, []Clsact{f})
	if err := theirs.Attach(returns(t, ebpf.SchedCLS, 0)); err != nil {
		t.Fatal(err)
	}
	wantKinds(t, r, "another one comes first", "ahead")
	l.NoteFilters(i, nil)
	wantKinds(t, r, "not ours any more")
	if err := l.Remove(i); err != nil {
		t.Fatal(err)
	}
}

func kinds(t *testing.T, r *Root) (out []string) {
	t.Helper()
	faults, err := r.Check()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range faults {
		out = append(out, string(f.Kind))
	}
	return out
}

// wantKinds waits for these kinds of faults, because the kernel detaches programs of earlier tests with a delay.
func wantKinds(t *testing.T, r *Root, what string, want ...string) {
	t.Helper()
	nstest.Eventually(t, func() error {
		if got := kinds(t, r); strings.Join(got, " ") != strings.Join(want, " ") {
			return fmt.Errorf("%s: faults %q, want %q", what, got, want)
		}
		return nil
	})
}

// Each kind of damage is reported, Restore repairs the repairable ones, and removal is not damage.
func TestCheckAndRestore(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	i, ln := publishHere(t, l)
	wantKinds(t, r, "published")
	restore := func(what string, want ...string) {
		t.Helper()
		lacks, err := l.Restore(i, anyMap)
		if err != nil || strings.Join(lacks, " ") != strings.Join(want, " ") {
			t.Errorf("%s: restored but for %q, %v; want %q", what, lacks, err, want)
		}
	}
	if err := ln.Detach(); err != nil {
		t.Fatal(err)
	}
	wantKinds(t, r, "detached", "detached")
	restore("detached")
	wantKinds(t, r, "attached again")
	for _, pin := range []string{"map_a", "meta"} {
		if err := os.Remove(filepath.Join(r.dir(i), pin)); err != nil {
			t.Fatal(err)
		}
	}
	wantKinds(t, r, "two pins lost", "pins")
	restore("two pins lost")
	wantKinds(t, r, "two pins restored")

	other := program(t, &ebpf.ProgramSpec{Name: "other", Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup})
	pinned, err := l.Link(i, "lookup")
	if err != nil {
		t.Fatal(err)
	}
	if err := MoveLink(pinned, other); err != nil {
		t.Fatal(err)
	}
	info, err := pinned.Info()
	if err != nil {
		t.Fatal(err)
	}
	pinned.Close()
	wantKinds(t, r, "another program", "program")
	restore("another program", "link_lookup")
	if err := os.RemoveAll(r.dir(i)); err != nil {
		t.Fatal(err)
	}
	wantKinds(t, r, "all pins lost", "pins")
	// the kernel releases an unpinned object later
	nstest.Eventually(t, func() error {
		l, err := link.NewFromID(info.ID)
		if err != nil {
			return nil
		}
		l.Close()
		return errors.New("a link without pins lives on")
	})
	restore("all pins lost", "link_lookup") // nothing holds the link; ln's program holds the map
	wantKinds(t, r, "meta restored", "pins")
	if m, err := r.Meta(i); err != nil || m.Version != "test" {
		t.Errorf("restored meta: %+v, %v", m, err)
	}
	if err := l.Remove(i); err != nil {
		t.Fatal(err)
	}
	wantKinds(t, r, "removed")
}

// A checker caches the owner of a program until pins change.
func TestOwnershipIsAskedAgain(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	i, _ := publishHere(t, l)
	c := NewChecker(r)
	defer c.close()
	check := func() (kinds []FaultKind) {
		t.Helper()
		faults, err := c.Check()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range faults {
			kinds = append(kinds, f.Kind)
		}
		return kinds
	}
	nstest.Until(t, "the directory is old enough", func() bool {
		st, err := os.Stat(r.dir(i))
		return err == nil && time.Since(st.ModTime()) > oldEnough
	})
	if got := check(); len(got) > 0 || len(c.owned) != 1 {
		t.Errorf("faults %v, and %d answers are known, want none and 1", got, len(c.owned))
	}
	for q := range c.owned { // a fresh query would give another answer
		c.owned[q] = false
	}
	if got := check(); !slices.Equal(got, []FaultKind{FaultProgram}) {
		t.Errorf("it asks again: %v", got)
	}
	for q := range c.owned {
		c.owned[q] = true
	}
	other, err := newMap()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	path := filepath.Join(r.dir(i), "map_a")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := other.Pin(path); err != nil {
		t.Fatal(err)
	}
	if got := check(); !slices.Equal(got, []FaultKind{FaultProgram}) || len(c.owned) != 0 {
		t.Errorf("another map in the place of its own: %v, and %d answers are known", got, len(c.owned))
	}
	if err := l.Remove(i); err != nil {
		t.Error(err)
	}
}

// A program of weir's own that replaces another during a check is not reported as foreign.
func TestExchangedWhileChecked(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	i, _ := publishHere(t, l)
	pinned, err := l.Link(i, "lookup")
	if err != nil {
		t.Fatal(err)
	}
	defer pinned.Close()
	c := NewChecker(r)
	defer c.close()
	if got := c.instance(i, record{}); len(got) > 0 || len(c.links) != 1 {
		t.Fatalf("faults %v, and %d links", got, len(c.links))
	}
	other := program(t, &ebpf.ProgramSpec{Name: "other", Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup})
	if err := MoveLink(pinned, other); err != nil {
		t.Fatal(err)
	}
	if out := c.ahead(); len(out) > 0 {
		t.Errorf("its own program: %v", out)
	}
	if err := l.Remove(i); err != nil {
		t.Error(err)
	}
}

// A writer killed between publishing and recording leaves an instance without a record. The next writer records it, but
// not after the loss of a pin: the record would be of fewer maps.
func TestRecordsAreMade(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	i, _ := publishHere(t, l)
	again := func(kinds ...string) {
		t.Helper()
		l.Unlock()
		if err := os.RemoveAll(r.recordsPath()); err != nil {
			t.Fatal(err)
		}
		wantKinds(t, r, "no record", kinds...)
		l = lock(t, r)
	}
	again()
	if _, err := r.Recorded(i); err != nil {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(r.dir(i), "map_a")); err != nil {
		t.Fatal(err)
	}
	again(string(FaultPins))
	if _, err := r.Recorded(i); err == nil {
		t.Error("recorded without a map")
	}
	if _, err := l.Open(i); !errors.Is(err, ErrDamaged) {
		t.Errorf("without a map: %v", err)
	}
	if err := l.Remove(i); err != nil {
		t.Fatal(err)
	}
	l.Unlock()
	if left, _ := filepath.Glob(filepath.Join(RecordDir, "*")); len(left) > 0 {
		t.Errorf("removed, and there is still %q", left)
	}
}

// The meta of an earlier weir names no maps: the record does.
func TestLostPinOfEarlierWeir(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	i, _ := publishHere(t, l)
	meta, err := l.Meta(i)
	if err != nil {
		t.Fatal(err)
	}
	meta.parts = parts.Parts{}
	m, err := meta.create()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	path := filepath.Join(r.dir(i), metaPin)
	if err := errors.Join(os.Remove(path), m.Pin(path)); err != nil {
		t.Fatal(err)
	}
	if o, err := l.Open(i); err != nil {
		t.Errorf("with all pins: %v", err)
	} else {
		o.Close()
	}
	if err := os.Remove(filepath.Join(r.dir(i), mapPrefix+"a")); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Open(i); !errors.Is(err, ErrDamaged) {
		t.Errorf("without a map: %v", err)
	}
	if err := l.Remove(i); err != nil {
		t.Error(err)
	}
}

// An instance without pins and without a namespace cannot be recovered: its record is removed, and then the directories.
func TestRecordsOfGoneNamespaces(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	here, _ := publishHere(t, l)
	gone := Instance{Scope: "4294967290", Feature: "test", Name: "gone"} // no namespace has this number
	for _, i := range []Instance{gone, instance} {
		if err := publish(l, i, 1); err != nil {
			t.Fatal(err)
		}
	}
	l.Unlock()
	lose := func(i Instance) {
		t.Helper()
		if err := os.RemoveAll(r.dir(i)); err != nil {
			t.Fatal(err)
		}
	}
	recorded := func(when string, want ...Instance) {
		t.Helper()
		lock(t, r).Unlock()
		for _, i := range []Instance{here, gone, instance} {
			if _, err := r.Recorded(i); slices.Contains(want, i) != (err == nil) {
				t.Errorf("%s: %s is recorded: %t", when, i, err == nil)
			}
		}
	}
	recorded("with pins", here, gone, instance)
	for _, i := range []Instance{here, gone, instance} {
		lose(i)
	}
	recorded("without pins", here, instance)
	l = lock(t, r)
	l.ForgetDamaged(func(Instance) bool { return true })
	l.Unlock()
	if _, err := os.Stat(r.recordsPath()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of records without any: %v", err)
	}
}

// A namespace with the number of a gone one is not weir's: nothing is reported of it, and nothing is attached there.
func TestNumberOfAnotherNamespace(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	if err := NetnsCookie.Check(); err != nil {
		t.Skip("need: kernel:", err)
	}
	i, ln := publishHere(t, l, func(m *Meta) { m.Cookie++ })
	if err := ln.Detach(); err != nil {
		t.Fatal(err)
	}
	wantKinds(t, r, "detached with its namespace")
	if _, err := l.Restore(i, anyMap); err == nil {
		t.Error("it was restored in another's namespace")
	}
}

// A gone namespace is not damage.
func TestGoneNamespaceIsNoDamage(t *testing.T) {
	r := newRoot(t)
	ns, err := netns.Create("weir-health")
	if err != nil {
		t.Fatal(err)
	}
	l := lock(t, r)
	defer l.Unlock()
	var i Instance
	if err := ns.Do(func() error { i, _ = publishHere(t, l); return nil }); err != nil {
		t.Fatal(err)
	}
	ns.Close()
	if err := netns.Delete("weir-health"); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "the namespace is gone", func() bool { _, err := netns.OfScope("", i.Scope, 0); return err != nil })
	wantKinds(t, r, "namespace gone")
	if err := os.Remove(filepath.Join(r.dir(i), "map_a")); err != nil {
		t.Fatal(err)
	}
	wantKinds(t, r, "namespace gone, and a pin")
}

// A forged or copied record names objects of others. Restore neither pins nor attaches nor detaches them.
func TestForeignObjectsInARecord(t *testing.T) {
	needs(t, TCXLink)
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	i, _ := publishHere(t, l)
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "theirs_map", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	prog := over(t, ebpf.SchedCLS, ebpf.AttachNone, m)
	theirs, err := TCX{Ifindex: lo.Index, Device: "lo"}.Attach(prog)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	mi, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	li, err := theirs.Info()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(l.recordsAt(l.device()), recordName(i))
	rec, err := l.readRecord(path)
	if err != nil {
		t.Fatal(err)
	}
	id, _ := mi.ID()
	filter := Clsact{Ifindex: lo.Index, Name: "theirs"}
	rec.Maps["zz"] = id
	rec.Links["dev"] = linkRecord{li.ID, newTarget(li)}
	rec.Filters = []filterRecord{{filter, uint32(li.Program)}}
	l.writeRecord(rec)
	for range 2 { // the second Restore meets the pins of the first
		lacks, err := l.Restore(i, func(name string) bool { return name != "theirs_map" })
		if err != nil || strings.Join(lacks, " ") != linkPrefix+"dev" {
			t.Errorf("restored but for %q, %v", lacks, err)
		}
		if now, err := theirs.Info(); err != nil || newTarget(now).Where == 0 {
			t.Errorf("the foreign link is detached: %v, %v", now, err)
		}
		if there, err := filter.Attached(); err != nil || there {
			t.Errorf("the foreign program is attached: %v, %v", there, err)
		}
		for _, pin := range []string{mapPrefix + "zz", linkPrefix + "dev"} {
			if _, err := os.Stat(filepath.Join(r.dir(i), pin)); err == nil {
				t.Errorf("%s is pinned", pin)
			}
		}
	}
}

// mapOfAnotherRoot publishes a map at another root, with or without a program, and returns its ID.
func mapOfAnotherRoot(t *testing.T, path string, used bool) ebpf.MapID {
	t.Helper()
	r := OpenRoot(path)
	l := lock(t, r)
	defer l.Unlock()
	from := instance
	if used {
		from, _ = publishHere(t, l)
	} else if err := publishWith(l, from, 1, nil); err != nil {
		t.Fatal(err)
	}
	rec, ok := l.recorded(from)
	if !ok {
		t.Fatal("no record")
	}
	return rec.Maps["a"]
}

// A map of another root has a name of weir's. If a program uses it, it is another's wherever it is pinned, even below
// another mount. Else it must have no pin outside the root. Neither a second mount of the root's file system nor a second
// pin in the root is outside.
func TestMapOfAnotherRootInARecord(t *testing.T) {
	r := newRoot(t)
	nstest.Enter(t)
	spaced, covered := filepath.Join(t.TempDir(), "my bpf"), t.TempDir()
	if err := errors.Join(os.Mkdir(spaced, 0o700), unix.Mount("bpf", spaced, "bpf", 0, ""), unix.Mount("bpf", covered, "bpf", 0, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, at := range []string{covered, covered, spaced} {
			_ = unix.Unmount(at, unix.MNT_DETACH)
		}
	})
	theirs := map[string]ebpf.MapID{
		"used":        mapOfAnotherRoot(t, r.path+"y", true),
		"unused":      mapOfAnotherRoot(t, r.path+"z", false),
		"spaced":      mapOfAnotherRoot(t, filepath.Join(spaced, "used"), true),
		"spacedplain": mapOfAnotherRoot(t, filepath.Join(spaced, "unused"), false),
		"covered":     mapOfAnotherRoot(t, filepath.Join(covered, "used"), true),
	}
	t.Cleanup(func() { _ = errors.Join(os.RemoveAll(r.path+"y"), os.RemoveAll(r.path+"z")) })
	if err := unix.Mount("none", covered, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	l := lock(t, r)
	defer l.Unlock()
	i, _ := publishHere(t, l)
	o, err := l.Open(i)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	again := t.TempDir()
	if err := unix.Mount(nstest.BPFFS, again, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(again, unix.MNT_DETACH) }()
	second := Instance{Scope: i.Scope, Feature: "test", Name: "second"}
	if err := errors.Join(l.Publish(second, o.Meta, Pins{Maps: o.Maps}), os.Remove(filepath.Join(r.dir(i), mapPrefix+"a"))); err != nil {
		t.Fatal(err)
	}
	rec, ok := l.recorded(i)
	if !ok {
		t.Fatal("no record")
	}
	rec.Maps["used"] = theirs["used"]
	l.writeRecord(rec)
	if lacks, err := l.Restore(i, anyMap); err != nil || len(lacks) > 0 {
		t.Errorf("restored but for %q, %v", lacks, err)
	}
	if now, err := l.Open(i); err != nil {
		t.Errorf("a wrong entry is not dropped: %v", err)
	} else {
		now.Close()
	}
	maps.Copy(rec.Maps, theirs)
	l.writeRecord(rec)
	if lacks, err := l.Restore(i, anyMap); err != nil || len(lacks) > 0 {
		t.Errorf("restored but for %q, %v", lacks, err)
	}
	for name := range theirs {
		if _, err := os.Stat(filepath.Join(r.dir(i), mapPrefix+name)); err == nil {
			t.Errorf("the map %s of the other root is pinned", name)
		}
	}
	if rec, _ := l.recorded(i); len(rec.Maps) != 1 {
		t.Errorf("recorded maps %v, want a", rec.Maps)
	}
	if err := errors.Join(l.Remove(i), l.Remove(second)); err != nil {
		t.Error(err)
	}
}

// anyMap accepts all names of maps.
func anyMap(string) bool { return true }

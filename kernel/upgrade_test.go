// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// programUsing loads a minimal sk_lookup program over maps.
func programUsing(ms ...*ebpf.Map) (*ebpf.Program, error) {
	var ins asm.Instructions
	for _, m := range ms {
		ins = append(ins, asm.LoadMapPtr(asm.R1, m.FD()))
	}
	return ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup, License: "Dual BSD/GPL",
		Instructions: append(ins, asm.Mov.Imm(asm.R0, 1), asm.Return())})
}

// versionMaps creates maps a and b with a version.
func versionMaps(version uint64) (map[string]*ebpf.Map, closers, error) {
	out, open := map[string]*ebpf.Map{}, closers{}
	for _, name := range []string{"a", "b"} {
		m, err := newMap()
		if err == nil {
			open = append(open, m)
			err = m.Put(uint32(0), version)
		}
		if err != nil {
			open.close()
			return nil, nil, err
		}
		out[name] = m
	}
	return out, open, nil
}

// publishAttached publishes version 1 with a program over its maps.
func publishAttached(l *WriteLock) error {
	ms, open, err := versionMaps(1)
	if err != nil {
		return err
	}
	defer open.close()
	p, err := programUsing(ms["a"], ms["b"])
	if err != nil {
		return err
	}
	defer p.Close()
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	ln, err := NetnsLookup{FD: ns.FD(), Inode: ns.Inode()}.Attach(p)
	if err != nil {
		return err
	}
	defer ln.Close()
	return l.Publish(instance, metaOf(1), Pins{Maps: ms, Links: map[string]link.Link{"lookup": ln}})
}

// upgradeTo upgrades the instance to a version in one of three ways. "link" moves its link to a program with its own
// maps, "shared" to one with shared maps. "swap" uses attachments without a link, here two files.
func upgradeTo(l *WriteLock, way, files string, version uint64) error {
	ms, open, err := versionMaps(version)
	if err != nil {
		return err
	}
	defer open.close()
	if way == "shared" {
		o, err := l.Open(instance)
		if err != nil {
			return err
		}
		defer o.Close()
		ms = o.Maps
	}
	u := Upgrade{Meta: metaOf(version), Pins: Pins{Maps: ms}}
	if way == "swap" {
		u.Swap = func() error { return attachFiles(files, version) }
		return l.Upgrade(instance, u)
	}
	if u.Program, err = programUsing(ms["a"], ms["b"]); err != nil {
		return err
	}
	defer u.Program.Close()
	u.Link = "lookup"
	return l.Upgrade(instance, u)
}

func attachFiles(files string, version uint64) error {
	for _, f := range []string{files + "/one", files + "/two"} {
		if err := os.WriteFile(f, fmt.Append(nil, version), 0o600); err != nil {
			return err
		}
		Step("test:attached")
	}
	return nil
}

// playUpgrade upgrades to version 2 and is killed at a step: KIND WAY STEP ROOT FILES.
func playUpgrade(f []string) error {
	if f[0] == "twostep" {
		kerneltest.WithoutExchange()
	}
	kerneltest.DieAt(f[2])
	l, err := OpenRoot(f[3]).Lock(context.Background())
	if err != nil {
		return err
	}
	defer l.Unlock()
	if f[1] == "recover" {
		return nil
	}
	return upgradeTo(l, f[1], f[4], 2)
}

// attached returns the program of the instance's link, and its maps.
func attached(t *testing.T, dir string) (ebpf.ProgramID, []ebpf.MapID) {
	t.Helper()
	ln, err := link.LoadPinnedLink(filepath.Join(dir, "link_lookup"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	info, err := ln.Info()
	if err != nil {
		t.Fatal(err)
	}
	p, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	pi, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	ids, _ := pi.MapIDs()
	return info.Program, ids
}

// After a kill at any step, the next Lock makes the instance match its attachment: the published maps are the program's
// maps, and meta has the same version.
func TestUpgradeKilledAtAnyStep(t *testing.T) {
	for _, way := range []string{"link", "shared", "swap"} {
		for _, kind := range []string{"exchange", "twostep"} {
			t.Run(way+"/"+kind, func(t *testing.T) {
				if kind == "exchange" {
					needExchange(t)
				}
				var steps []string
				for n := 0; ; n++ {
					step := crashUpgrade(t, kind, way, n)
					if step == "" {
						break
					}
					steps = append(steps, step)
				}
				t.Log("killed at", strings.Join(steps, ", "))
				want := []string{"publish:mkdir", "upgrade:recorded", "publish:pin meta", "upgrade:staged", "upgrade:swapped", "publish:settled", "remove:unpinned"}
				want = append(want, map[string][]string{"exchange": {"publish:exchanged"}, "twostep": {"publish:retired", "publish:replaced"}}[kind]...)
				if way == "swap" {
					want = append(want, "upgrade:begun", "test:attached")
				}
				for _, w := range want {
					if !slices.Contains(steps, w) {
						t.Errorf("was never killed at %s", w)
					}
				}
			})
		}
	}
}

func crashUpgrade(t *testing.T, kind, way string, n int) string {
	t.Helper()
	r, files := newRoot(t), t.TempDir()
	l := lock(t, r)
	if err := errors.Join(publishAttached(l), attachFiles(files, 1)); err != nil {
		t.Fatal(err)
	}
	dir := r.dir(instance)
	before, _ := attached(t, dir)
	l.Unlock()
	step := kerneltest.Killed(t, nstest.Child("upgrade", kind, way, n, r.path, files))
	where := fmt.Sprintf("killed at step %d (%s)", n, step)
	kerneltest.Killed(t, nstest.Child("upgrade", kind, "recover", n%3, r.path, files)) // the recovery may be killed too
	l = lock(t, r)
	v := metaVersion(t, l)
	switch way {
	case "swap":
		one, _ := os.ReadFile(files + "/one")
		two, _ := os.ReadFile(files + "/two")
		if v == 1 && string(one)+string(two) != "11" {
			t.Errorf("%s: version 1 is published, attached are %s and %s", where, one, two)
		}
	default:
		program, ms := attached(t, dir)
		if v == 1 != (program == before) {
			t.Errorf("%s: version %d is published, and it was program %d and is %d", where, v, before, program)
		}
		o, err := l.Open(instance)
		if err != nil {
			t.Fatal(where, err)
		}
		for name, m := range o.Maps {
			if !slices.Contains(ms, mapID(t, m)) {
				t.Errorf("%s: map %s is not one that the program uses", where, name)
			}
		}
		o.Close()
	}
	if step == "" && v != 2 {
		t.Errorf("was not killed, and left version %d", v)
	}
	if left := inTransit(t, r); len(left) > 0 {
		t.Errorf("%s: left over: %v", where, left)
	}
	if _, err := os.Stat(filepath.Join(dir, swapPin)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: the record of the swap is left over", where)
	}
	if err := upgradeTo(l, way, files, 3); err != nil || metaVersion(t, l) != 3 {
		t.Errorf("%s: the next upgrade: %v", where, err)
	}
	if err := l.Remove(instance); err != nil {
		t.Errorf("%s: remove afterwards: %v", where, err)
	}
	l.Unlock()
	if left := tree(t, r); len(left) > 0 {
		t.Errorf("%s: removed, and there is still %v", where, left)
	}
	return step
}

func metaVersion(t *testing.T, l *WriteLock) (v uint64) {
	t.Helper()
	o, err := l.Open(instance)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if _, err := fmt.Sscan(string(o.Meta.Config), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// The link stays the same object: there is always a program.
func TestUpgradeKeepsTheLink(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	if err := publishAttached(l); err != nil {
		t.Fatal(err)
	}
	id := func() link.ID {
		ln, err := link.LoadPinnedLink(filepath.Join(r.dir(instance), "link_lookup"), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		info, err := ln.Info()
		if err != nil {
			t.Fatal(err)
		}
		return info.ID
	}
	// Links of earlier tests are released some time after they were unpinned.
	nstest.Until(t, "it alone is attached", func() bool { return lookupLinks(t) == 1 })
	first, links := id(), 1
	for v := uint64(2); v < 12; v++ {
		if err := upgradeTo(l, "link", "", v); err != nil {
			t.Fatal(err)
		}
		wantVersion(t, r, instance, v)
	}
	if now := id(); now != first || lookupLinks(t) != links {
		t.Errorf("link %d of %d became link %d of %d", first, links, now, lookupLinks(t))
	}
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
	nstest.Until(t, "the last link is gone", func() bool { return lookupLinks(t) == links-1 })
}

func TestUpgradeThatFails(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	if err := l.Upgrade(instance, Upgrade{Meta: metaOf(2)}); !errors.Is(err, ErrNotExist) {
		t.Errorf("upgrading what is not there: %v", err)
	}
	if got := tree(t, r); len(got) != 1 {
		t.Errorf("that made %v", got)
	}
	if err := publishAttached(l); err != nil {
		t.Fatal(err)
	}
	before := tree(t, r)
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.RawTracepoint, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	refused := errors.New("refused")
	for what, u := range map[string]Upgrade{
		"no such link":                 {Link: "none", Program: other},
		"a program of another type":    {Link: "lookup", Program: other},
		"an attachment that refuses":   {Swap: func() error { return refused }},
		"a link's name beyond reason ": {Link: strings.Repeat("x", 60), Program: other},
	} {
		u.Meta = metaOf(2)
		if err := l.Upgrade(instance, u); err == nil || u.Swap != nil && !errors.Is(err, refused) {
			t.Errorf("%s: %v", what, err)
		}
		if now := tree(t, r); !slices.Equal(now, before) {
			t.Errorf("%s: changed the pins to %v", what, now)
		}
	}
	wantVersion(t, r, instance, 1)
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
}

// A hundred upgrades leave no descriptor, pin or program behind.
func TestUpgradesLeakNothing(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	if err := publishAttached(l); err != nil {
		t.Fatal(err)
	}
	if err := upgradeTo(l, "shared", "", 2); err != nil { // some descriptors are opened once and stay open
		t.Fatal(err)
	}
	pins, fds := tree(t, r), descriptors(t)
	_, shared := attached(t, r.dir(instance))
	for v := uint64(3); v < 103; v++ {
		if err := upgradeTo(l, "shared", "", v); err != nil {
			t.Fatal(err)
		}
	}
	if now := tree(t, r); !slices.Equal(now, pins) {
		t.Errorf("pins were %v and are %v", pins, now)
	}
	if now := descriptors(t); now > fds { // fewer: the garbage collector closed some of earlier tests
		t.Errorf("%d descriptors were open and %d are", fds, now)
	}
	nstest.Until(t, "one program uses the maps", func() bool { return programsUsing(t, shared[0]) == 1 })
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
	nstest.Until(t, "no program uses the maps", func() bool { return programsUsing(t, shared[0]) == 0 })
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// programsUsing counts the loaded programs over a map.
func programsUsing(t *testing.T, m ebpf.MapID) int {
	t.Helper()
	n := 0
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			return n
		} else if err != nil {
			t.Fatal(err)
		}
		id = next
		p, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue // gone meanwhile
		}
		if info, err := p.Info(); err == nil {
			if ids, _ := info.MapIDs(); slices.Contains(ids, m) {
				n++
			}
		}
		p.Close()
	}
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel/internal/confined"
	"github.com/weir-project/weir/kernel/internal/mounts"
	"github.com/weir-project/weir/kernel/internal/parts"
)

// Lost returns the instances published on a BPF file system that is no longer mounted. It omits instances without a
// namespace.
func (r *Root) Lost() (out []Instance) {
	c := NewChecker(r)
	for _, device := range r.others() {
		recs := c.cache.read(r, r.recordsAt(device))
		for _, i := range inOrder(recs) {
			if !c.gone(i, recs[i]) && !slices.Contains(out, i) {
				out = append(out, i)
			}
		}
	}
	c.close()
	return out
}

// ForgetLost removes the records of unmounted file systems, after their recovery.
func (l *WriteLock) ForgetLost() {
	for _, device := range l.others() {
		if mounts.At(device) == "" {
			_ = l.files().RemoveAll(l.recordsAt(device))
		}
	}
}

// ForgetDamaged removes the records of instances without pins.
func (l *WriteLock) ForgetDamaged(of func(Instance) bool) {
	all, err := l.Instances("")
	if err != nil {
		return
	}
	for _, device := range append(l.others(), l.device()) {
		for i := range (recordCache{}).read(l.Root, l.recordsAt(device)) {
			if of(i) && (device != l.device() || !slices.Contains(all, i)) {
				_ = l.files().Remove(filepath.Join(l.recordsAt(device), recordName(i)))
			}
		}
		l.closeRecords(device)
	}
}

// recorded finds the record of an instance, even on an unmounted file system.
func (l *WriteLock) recorded(i Instance) (record, bool) {
	for _, device := range append([]uint64{l.device()}, l.others()...) {
		if rec, err := l.readRecord(filepath.Join(l.recordsAt(device), recordName(i))); err == nil {
			return rec, true
		}
	}
	return record{}, false
}

// Restore completes a damaged instance from its living parts. It pins maps and links still held by a program, a process
// or another link, attaches detached links again with their programs, and restores meta from the record. lacks names the
// pins lost for good. The instance then exists without them. A forged or copied record can name any object of the host. So
// a program must use a map of the instance, and a program of the instance must use a map. If no program uses a map, it
// must have no pin outside the root. Each map must have one of weir's names in the kernel (named). Restore drops entries
// with maps of other programs: the instance works without them. It rejects a record without one of the needed maps: the
// record is of something else. The error is [ErrNoRecord] without a record, and then [ErrForeignRecord] without pins.
func (l *WriteLock) Restore(i Instance, named func(mapName string) bool, needed ...string) (lacks []string, err error) {
	rec, ok := l.recorded(i)
	if !ok {
		return nil, fmt.Errorf("%s is damaged, and %w", i, ErrNoRecord)
	}
	meta, err := l.Meta(i)
	if err != nil {
		_ = meta.unmarshal(rec.Meta) // restoreMeta reports it
	}
	for _, name := range needed {
		if rec.Maps[name] == 0 {
			l.forget(i)
			err := ErrNoRecord
			if _, serr := os.Stat(l.dirPath(i)); serr != nil {
				err = ErrForeignRecord
			}
			return nil, fmt.Errorf("the record of %s has no map %s, so it is of something else: %w", i, name, err)
		}
	}
	c := NewChecker(l.Root)
	gone := c.gone(i, rec)
	c.close()
	if gone {
		return nil, fmt.Errorf("%s belongs to a gone network namespace, and another one may have its number: run weir remove", i)
	}
	dir := l.dirPath(i)
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		if err := l.makeRestored(dir); err != nil {
			return nil, err
		}
	}
	if lacks, err = l.restoreMaps(dir, rec, meta.parts, named); err != nil {
		return lacks, err
	}
	links, err := l.restoreLinks(i, rec)
	lacks = append(lacks, links...)
	if err == nil {
		err = errors.Join(l.restoreMeta(dir, rec), l.restoreFilters(i, rec))
	}
	if err != nil {
		return lacks, err
	}
	if st, err := os.Stat(dir); err == nil {
		rec.Dir = st.Sys().(*syscall.Stat_t).Ino
		l.writeRecord(rec) // without wrong entries, else the instance would not open
	}
	if len(lacks) == 0 {
		l.note(i)
	}
	return lacks, nil
}

// makeRestored creates the missing directory of an instance.
func (l *WriteLock) makeRestored(dir string) error {
	if err := l.files().MkdirAll(dir, 0o750); err != nil {
		return err
	}
	for d := dir; d != l.path; d = filepath.Dir(d) {
		if err := l.setRights(d, true, l.gid()); err != nil {
			return err
		}
	}
	return nil
}

func (l *WriteLock) restoreMaps(dir string, rec record, of parts.Parts, named func(string) bool) (lacks []string, err error) {
	outside := sync.OnceValue(func() map[ebpf.MapID]bool { return confined.MapsOutside(l.path, mounts.Of("bpf")) })
	claim := sync.OnceValue(func() *confined.Claim { return confined.NewClaim(l.path, dir, maps.Values(rec.Maps)) }) // by the pins found at first
	for _, name := range slices.Sorted(maps.Keys(rec.Maps)) {
		path := filepath.Join(dir, mapPrefix+name)
		if _, err := os.Stat(path); err == nil {
			continue
		}
		own, known := claim().Of(rec.Maps[name])
		if known && !own || !of.Names(name) {
			delete(rec.Maps, name) // a wrong entry is no damage
			continue
		}
		m, err := confined.MapInUse(rec.Maps[name], named, func(id ebpf.MapID) bool { return !known && outside()[id] })
		if err != nil && of.Needs(name) {
			lacks = append(lacks, mapPrefix+name)
			continue
		} else if err != nil {
			delete(rec.Maps, name)
			continue
		}
		err = errors.Join(confined.Pin(l.path, path, m), l.setRights(path, false, l.gid()))
		m.Close()
		if err != nil {
			return lacks, fmt.Errorf("pin %s again: %w", path, err)
		}
	}
	return lacks, nil
}

func (l *WriteLock) restoreMeta(dir string, rec record) error {
	path := filepath.Join(dir, metaPin)
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	var meta Meta
	if err := meta.unmarshal(rec.Meta); err != nil {
		return err
	}
	m, err := meta.create()
	if err != nil {
		return err
	}
	defer m.Close()
	return errors.Join(confined.Pin(l.path, path, m), l.setRights(path, false, l.gid()))
}

// restoreLinks pins living links without a pin, and attaches detached links again.
func (l *WriteLock) restoreLinks(i Instance, rec record) (lacks []string, err error) {
	var ns *netns.Handle
	if i.Scope != HostScope {
		if ns, err = l.OpenNetns(i); err != nil {
			return nil, err
		}
		defer ns.Close()
	}
	c := NewChecker(l.Root)
	c.spaces[i.Scope] = ns
	for _, name := range slices.Sorted(maps.Keys(rec.Links)) {
		was := rec.Links[name]
		f, bad := c.link(i, nil, rec, name)
		_, statErr := os.Stat(filepath.Join(l.dirPath(i), linkPrefix+name))
		if statErr == nil && !bad {
			continue
		}
		there := false
		inSpace(ns, func() { there = was.exists(ns) })
		if !there {
			continue // gone with its device, followed by the feature
		}
		var ln Link
		if statErr != nil {
			ln, err = c.liveLink(i, was)
		} else if f.Kind == FaultDetached {
			ln, err = l.attachAgain(i, name, was, ns)
		} else {
			err = ErrDetached
		}
		if err != nil {
			lacks = append(lacks, linkPrefix+name)
			continue
		}
		err = errors.Join(l.RemoveLink(i, name), l.addLink(i, name, ln))
		ln.Close()
		if err != nil {
			return lacks, err
		}
	}
	return lacks, nil
}

// liveLink finds a living link without a pin. It rejects a detached link, and a link with a foreign program.
func (c *Checker) liveLink(i Instance, was linkRecord) (Link, error) {
	ln, err := link.NewFromID(was.ID)
	if err != nil {
		return nil, err
	}
	if info, err := ln.Info(); err != nil || newTarget(info) != was.target || !c.runsOwnLink(i, ln) {
		ln.Close()
		return nil, ErrDetached
	}
	return ln, nil
}

// runsOwn reports whether a program uses a map of the instance.
func (c *Checker) runsOwn(i Instance, program ebpf.ProgramID) bool {
	own, _ := c.usesMap(i, program)
	return own
}

// runsOwnLink reports whether a link's program uses a map of the instance.
func (c *Checker) runsOwnLink(i Instance, ln Link) bool {
	info, err := ln.Info()
	return err == nil && c.runsOwn(i, info.Program)
}

// attachAgain attaches the program of a detached link to its recorded hook.
func (l *WriteLock) attachAgain(i Instance, name string, was linkRecord, ns *netns.Handle) (ln Link, err error) {
	old, err := confined.LoadLink(l.path, filepath.Join(l.dirPath(i), linkPrefix+name))
	if err != nil {
		return nil, err
	}
	defer old.Close()
	info, err := old.Info()
	if err != nil {
		return nil, err
	}
	if info.ID != was.ID || !NewChecker(l.Root).runsOwn(i, info.Program) {
		return nil, fmt.Errorf("%s%s: %w", linkPrefix, name, ErrDetached)
	}
	prog, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return nil, err
	}
	defer prog.Close()
	inSpace(ns, func() {
		var at Attachment
		if at, err = was.attachment(ns); err == nil {
			ln, err = at.Attach(prog)
		}
	})
	return ln, err
}

// attachment returns the target as an Attachment. The caller is in the namespace.
func (t target) attachment(ns *netns.Handle) (Attachment, error) {
	switch t.Kind {
	case targetLookup:
		return NetnsLookup{FD: ns.FD(), Inode: ns.Inode()}, nil
	case targetTCX:
		return TCX{Ifindex: int(t.Where), Device: deviceName(t.Where), Egress: ebpf.AttachType(t.Hook) == ebpf.AttachTCXEgress}, nil
	case targetXDP:
		// The mode is not recorded. Native mode is tried first: if it works, it was the mode.
		return anyXDP{XDP{Ifindex: int(t.Where), Device: deviceName(t.Where)}}, nil
	case targetCgroup:
		root, err := units.CgroupRoot()
		return Cgroup{Path: root, Hook: ebpf.AttachType(t.Hook)}, err
	case targetNetfilter:
		return t.netfilter(), nil
	}
	return nil, ErrDetached
}

// anyXDP attaches in native mode, or else in generic mode.
type anyXDP struct{ XDP }

func (a anyXDP) Attach(prog *ebpf.Program) (Link, error) {
	l, err := a.XDP.Attach(prog)
	if errors.Is(err, ErrUnsupported) {
		a.Generic = true
		return a.XDP.Attach(prog)
	}
	return l, err
}

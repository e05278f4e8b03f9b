// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel/internal/confined"
)

// ErrDamaged is returned if single pins of an instance are missing.
var ErrDamaged = errors.New("a pin is gone")

// ErrForeignRecord is returned for a record of something else under the name of an instance without pins.
var ErrForeignRecord = errors.New("the record is removed")

// ErrNoRecord is returned for a damaged instance without a record of its parts.
var ErrNoRecord = errors.New("there is no record of its parts: run weir remove for its feature, then weir apply")

func fileInode(f os.FileInfo) uint64 { return f.Sys().(*syscall.Stat_t).Ino }

// Opened is a published instance, open for reading, or through a WriteLock for writing. The caller closes it.
type Opened struct {
	Instance Instance
	Meta     Meta
	Maps     map[string]*ebpf.Map
	root     *Root
	dir      string
	was      os.FileInfo // the directory at the time of opening
}

// Open opens an instance for reading, as allowed for the group. It opens the named maps, or all maps if none is named.
// It returns ErrNotExist if the instance is not published.
func (r *Root) Open(i Instance, maps ...string) (*Opened, error) {
	return r.open(i, &ebpf.LoadPinOptions{ReadOnly: true}, maps)
}

// Open opens an instance for writing.
func (l *WriteLock) Open(i Instance, maps ...string) (*Opened, error) {
	return l.Root.open(i, nil, maps)
}

// OpenMapsForWriting opens an instance's maps for writing without the lock. Only a child process of the lock holder may
// call it. The holder waits for the child, and nobody else writes to these maps. All other writers call [Root.Lock].
func (r *Root) OpenMapsForWriting(i Instance, maps ...string) (*Opened, error) {
	return r.open(i, nil, maps)
}

func (r *Root) open(i Instance, opts *ebpf.LoadPinOptions, maps []string) (*Opened, error) {
	for try := 0; ; try++ {
		o, dir, err := r.openOnce(i, opts, maps)
		if !errors.Is(err, ErrNotExist) || try == openTries || !r.replaced(i, dir) {
			return o, err
		}
		// A concurrent replacement has removed the opened directory, or the name is free between its two renames. The
		// new one follows soon.
		time.Sleep(time.Millisecond)
	}
}

// openTries bounds the retries of a reader during a replacement.
const openTries = 300

// openOnce opens everything through one directory handle. Opening by name could mix the meta of an instance with the
// maps of its successor. was is the opened directory, or nil if there was none.
func (r *Root) openOnce(i Instance, opts *ebpf.LoadPinOptions, maps []string) (_ *Opened, was os.FileInfo, _ error) {
	o := &Opened{Instance: i, Maps: map[string]*ebpf.Map{}, root: r, dir: r.dir(i)}
	dir, err := confined.Open(r.path, o.dir)
	if err != nil {
		return nil, nil, r.explainOpen(o.dir, err)
	}
	defer dir.Close()
	if was, err = dir.Stat(); err != nil {
		return nil, nil, err
	}
	o.was = was
	if err := r.openPins(o, confined.Name(dir), opts, maps); err != nil {
		o.Close()
		return nil, was, err
	}
	return o, was, nil
}

// openPins opens the pins in the directory of handle.
func (r *Root) openPins(o *Opened, handle string, opts *ebpf.LoadPinOptions, maps []string) error {
	load := func(name string) (*ebpf.Map, error) {
		m, err := confined.LoadMap(handle, filepath.Join(handle, name), opts)
		return m, r.explainOpen(filepath.Join(o.dir, name), err)
	}
	meta, err := load(metaPin)
	if err != nil {
		return err
	}
	err = o.Meta.read(meta, o.Instance)
	meta.Close()
	if err != nil {
		return fmt.Errorf("read %s: %w", filepath.Join(o.dir, metaPin), err)
	}
	all := len(maps) == 0
	if all {
		if maps, err = confined.Names(handle, mapPrefix); err == nil {
			// Removal unpins meta before the maps: while meta exists, the list is complete.
			_, err = os.Stat(filepath.Join(handle, metaPin))
		}
		if err != nil {
			return r.explainOpen(o.dir, err)
		}
	}
	needed := o.Meta.parts
	if needed.Instance == "" { // published by an earlier weir
		needed.Maps = r.recordedMaps(o.Instance, fileInode(o.was))
	}
	if name, lacks := needed.Lacks(maps); all && lacks {
		return fmt.Errorf("%s: %w: %s", filepath.Join(o.dir, mapPrefix+name), ErrDamaged, remedyApply)
	}
	for _, name := range maps {
		if o.Maps[name], err = load(mapPrefix + name); err != nil {
			delete(o.Maps, name)
			return err
		}
	}
	return nil
}

// OpenRest opens the remaining maps of a damaged instance for writing. It needs the meta.
func (l *WriteLock) OpenRest(i Instance) (*Opened, error) {
	o := &Opened{Instance: i, Maps: map[string]*ebpf.Map{}, root: l.Root, dir: l.dirPath(i)}
	var err error
	if o.Meta, err = l.Meta(i); err != nil {
		return nil, err
	}
	names, err := confined.Names(o.dir, mapPrefix)
	if err != nil {
		return nil, l.explainOpen(o.dir, err)
	}
	for _, name := range names {
		if m, err := confined.LoadMap(l.path, filepath.Join(o.dir, mapPrefix+name), nil); err == nil {
			o.Maps[name] = m
		}
	}
	return o, nil
}

// Has reports whether anything of an instance is pinned.
func (r *Root) Has(i Instance) bool {
	_, err := os.Stat(r.dir(i))
	return err == nil
}

// OpenMap opens one map of an instance for writing, even if its meta is unreadable. The caller closes it.
func (l *WriteLock) OpenMap(i Instance, name string) (*ebpf.Map, error) {
	path := filepath.Join(l.dirPath(i), mapPrefix+name)
	m, err := confined.LoadMap(l.path, path, nil)
	return m, l.explainOpen(path, err)
}

// Meta reads the meta of an instance. It returns ErrNotExist if the instance is not published.
func (r *Root) Meta(i Instance) (m Meta, err error) {
	path := filepath.Join(r.dir(i), metaPin)
	pin, err := confined.LoadMap(r.path, path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return m, r.explainOpen(path, err)
	}
	defer pin.Close()
	if err := m.read(pin, i); err != nil {
		return m, fmt.Errorf("read %s: %w", path, err)
	}
	return m, nil
}

// replaced reports whether the directory of an instance has been replaced, or is about to be. It reads the parent
// directory once, and no rename can interleave. Two separate stat calls could both miss an existing instance during a
// replacement.
func (r *Root) replaced(i Instance, was os.FileInfo) bool {
	dir := r.dir(i)
	names, _ := r.allNames(filepath.Dir(dir))
	if slices.Contains(names, i.Name+stagedSuffix) {
		return true
	}
	if !slices.Contains(names, i.Name) {
		return false
	}
	now, err := os.Stat(dir)
	return err != nil || was == nil || !os.SameFile(was, now)
}

func (r *Root) explainOpen(path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%s: %w", path, ErrNotExist)
	case errors.Is(err, os.ErrPermission):
		return r.unreadable(path)
	}
	if outer, ok := err.(*os.PathError); ok {
		err = outer.Err // its path is the same one, or below a descriptor
	}
	if scarce(err) != "" {
		return fmt.Errorf("open %s: %w: %s", path, err, scarce(err))
	}
	return fmt.Errorf("open %s: %w", path, err)
}

// Replaced reports whether the instance has been published again or removed since it was opened. Its maps may be stale
// then.
func (o *Opened) Replaced() bool {
	now, err := os.Stat(o.dir)
	return err != nil || !os.SameFile(o.was, now)
}

// Link opens a pinned link. Only the owner may do so.
func (o *Opened) Link(name string) (Link, error) {
	l, err := confined.LoadLink(o.root.path, filepath.Join(o.dir, linkPrefix+name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", filepath.Join(o.dir, linkPrefix+name), ErrNotExist)
	}
	return l, err
}

// RunsOwn reports whether a link's program uses a map of the instance. Other links are not weir's to detach.
func (o *Opened) RunsOwn(ln Link) bool { return NewChecker(o.root).runsOwnLink(o.Instance, ln) }

// Link opens a pinned link of an instance, even of a damaged one.
func (l *WriteLock) Link(i Instance, name string) (Link, error) {
	return (&Opened{root: l.Root, dir: l.dirPath(i)}).Link(name)
}

// Links returns the names of the instance's links.
func (o *Opened) Links() ([]string, error) { return confined.Names(o.dir, linkPrefix) }

// Close closes the maps. The pins stay.
func (o *Opened) Close() {
	for _, m := range o.Maps {
		m.Close()
	}
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// ErrDamaged says that pins of an instance were taken away one by one.
var ErrDamaged = errors.New("a pin is gone")

func fileInode(f os.FileInfo) uint64 { return f.Sys().(*syscall.Stat_t).Ino }

// Opened is a published instance, open for reading or, through a WriteLock, for
// writing. Close it.
type Opened struct {
	Instance Instance
	Meta     Meta
	Maps     map[string]*ebpf.Map
	dir      string
	was      os.FileInfo // the directory when it was opened
}

// Open opens an instance for reading: the group may. Only the maps named are
// opened, all of them when none is. It returns ErrNotExist where the instance
// is not published.
func (r *Root) Open(i Instance, maps ...string) (*Opened, error) {
	return r.open(i, &ebpf.LoadPinOptions{ReadOnly: true}, maps)
}

// Open opens an instance for writing.
func (l *WriteLock) Open(i Instance, maps ...string) (*Opened, error) {
	return l.Root.open(i, nil, maps)
}

// OpenMapsForWriting opens an instance's maps for writing without the lock. It is
// for the process that a lock's holder starts and waits for, and that writes into
// maps that nobody else writes into; everyone else calls [Root.Lock].
func (r *Root) OpenMapsForWriting(i Instance, maps ...string) (*Opened, error) {
	return r.open(i, nil, maps)
}

func (r *Root) open(i Instance, opts *ebpf.LoadPinOptions, maps []string) (*Opened, error) {
	for try := 0; ; try++ {
		o, dir, err := r.openOnce(i, opts, maps)
		if !errors.Is(err, ErrNotExist) || try == openTries || !r.replaced(i, dir) {
			return o, err
		}
		// What was being opened has been taken apart, or the name is free for the
		// instant between two renames: the new one is there now, or very soon.
		time.Sleep(time.Millisecond)
	}
}

// openTries bounds how often a reader that a replacement overtook looks again.
const openTries = 300

// openOnce opens everything through one handle of the directory: by its name,
// a reader could get the meta of an instance and the maps of its successor. It
// returns which directory that was, nil where there was none.
func (r *Root) openOnce(i Instance, opts *ebpf.LoadPinOptions, maps []string) (_ *Opened, was os.FileInfo, _ error) {
	o := &Opened{Instance: i, Maps: map[string]*ebpf.Map{}, dir: r.dir(i)}
	dir, err := os.OpenFile(o.dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, nil, r.explainOpen(o.dir, err)
	}
	defer dir.Close()
	if was, err = dir.Stat(); err != nil {
		return nil, nil, err
	}
	o.was = was
	if err := r.openPins(o, fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), opts, maps); err != nil {
		o.Close()
		return nil, was, err
	}
	return o, was, nil
}

// openPins opens what is pinned in the directory that handle leads to.
func (r *Root) openPins(o *Opened, handle string, opts *ebpf.LoadPinOptions, maps []string) error {
	load := func(name string) (*ebpf.Map, error) {
		m, err := ebpf.LoadPinnedMap(filepath.Join(handle, name), opts)
		return m, r.explainOpen(filepath.Join(o.dir, name), err)
	}
	meta, err := load(metaPin)
	if err != nil {
		return err
	}
	err = o.Meta.read(meta)
	meta.Close()
	if err != nil {
		return fmt.Errorf("reading %s: %w", filepath.Join(o.dir, metaPin), err)
	}
	all := len(maps) == 0
	if all {
		if maps, err = pinNames(handle, mapPrefix); err == nil {
			// It goes before the maps: while it is there, the list is whole.
			_, err = os.Stat(filepath.Join(handle, metaPin))
		}
		if err != nil {
			return r.explainOpen(o.dir, err)
		}
	}
	if rec, err := readRecord(filepath.Join(r.recordsAt(r.device()), recordName(o.Instance))); all && err == nil && rec.Dir == fileInode(o.was) {
		for name := range rec.Maps {
			if !slices.Contains(maps, name) {
				return fmt.Errorf("%s: %w: %s", filepath.Join(o.dir, mapPrefix+name), ErrDamaged, remedyApply)
			}
		}
	}
	for _, name := range maps {
		if o.Maps[name], err = load(mapPrefix + name); err != nil {
			delete(o.Maps, name)
			return err
		}
	}
	return nil
}

// OpenRest opens for writing what a damaged instance still has. It needs the meta.
func (l *WriteLock) OpenRest(i Instance) (*Opened, error) {
	o := &Opened{Instance: i, Maps: map[string]*ebpf.Map{}, dir: l.dirPath(i)}
	var err error
	if o.Meta, err = l.Meta(i); err != nil {
		return nil, err
	}
	names, err := pinNames(o.dir, mapPrefix)
	if err != nil {
		return nil, l.explainOpen(o.dir, err)
	}
	for _, name := range names {
		if m, err := ebpf.LoadPinnedMap(filepath.Join(o.dir, mapPrefix+name), nil); err == nil {
			o.Maps[name] = m
		}
	}
	return o, nil
}

// Has tells whether anything of an instance is pinned.
func (r *Root) Has(i Instance) bool {
	_, err := os.Stat(r.dir(i))
	return err == nil
}

// OpenMap opens one map of an instance whose meta may be unreadable, for writing. The caller closes it.
func (l *WriteLock) OpenMap(i Instance, name string) (*ebpf.Map, error) {
	path := filepath.Join(l.dirPath(i), mapPrefix+name)
	m, err := ebpf.LoadPinnedMap(path, nil)
	return m, l.explainOpen(path, err)
}

// Meta reads who made an instance, from what. It returns ErrNotExist where the
// instance is not published.
func (r *Root) Meta(i Instance) (m Meta, err error) {
	path := filepath.Join(r.dir(i), metaPin)
	pin, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return m, r.explainOpen(path, err)
	}
	defer pin.Close()
	if err := m.read(pin); err != nil {
		return m, fmt.Errorf("reading %s: %w", path, err)
	}
	return m, nil
}

// replaced says whether the directory of an instance is another one now, or is
// about to be. It is one reading of the directory above, which no rename gets
// into: two looks at two names can both miss an instance that is never gone,
// each in the replacement when the name that it asks for is free.
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
	case scarce(err) != "":
		return fmt.Errorf("opening %s: %w: %s", path, err, scarce(err))
	}
	return fmt.Errorf("opening %s: %w", path, err)
}

// Replaced says that another form of the instance has been published since this
// one was opened, or none is: its maps may be those that nobody writes any more.
func (o *Opened) Replaced() bool {
	now, err := os.Stat(o.dir)
	return err != nil || !os.SameFile(o.was, now)
}

// Link opens a pinned link, which only the owner may.
func (o *Opened) Link(name string) (Link, error) {
	l, err := link.LoadPinnedLink(filepath.Join(o.dir, linkPrefix+name), nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", filepath.Join(o.dir, linkPrefix+name), ErrNotExist)
	}
	return l, err
}

// Link opens a pinned link of an instance, also of one that is damaged.
func (l *WriteLock) Link(i Instance, name string) (Link, error) {
	return (&Opened{dir: l.dirPath(i)}).Link(name)
}

// Links lists the names of the instance's links.
func (o *Opened) Links() ([]string, error) { return pinNames(o.dir, linkPrefix) }

// Close closes the maps; the pins stay.
func (o *Opened) Close() {
	for _, m := range o.Maps {
		m.Close()
	}
}

func pinNames(dir, prefix string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if n, ok := strings.CutPrefix(e.Name(), prefix); ok {
			out = append(out, n)
		}
	}
	return out, nil
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel/internal/confined"
	"github.com/weir-project/weir/kernel/internal/parts"
	"github.com/weir-project/weir/kernel/internal/step"
	"golang.org/x/sys/unix"
)

const (
	metaPin    = "meta"
	mapPrefix  = "map_"
	linkPrefix = "link_"
)

func isLink(pin string) bool { return strings.HasPrefix(pin, linkPrefix) }

// Pins are the parts of an instance beside its meta, by name without prefix. A program has no pin of its own: its link
// holds it.
type Pins struct {
	Maps     map[string]*ebpf.Map
	Links    map[string]Link
	Optional []string // maps without which the instance still works
}

// Publish pins an instance in a staging directory, then moves the directory into place. It replaces an older instance of
// the name. After a kill at any step the old state, the new one or none exists, and the next Lock removes the rest.
func (l *WriteLock) Publish(i Instance, meta Meta, pins Pins) error {
	if err := i.validate(); err != nil {
		return err
	}
	dir := l.dirPath(i)
	staged, err := l.makeStaged(dir)
	if err == nil {
		if err = l.stage(staged, meta, pins); err == nil {
			if err = l.commit(staged, dir); err == nil {
				l.note(i)
			}
		}
		if err != nil {
			err = errors.Join(err, l.removeTree(staged))
		}
	}
	if err != nil {
		return fmt.Errorf("publish %s: %w", i, err)
	}
	return nil
}

// makeStaged creates the staging directory of an instance.
func (l *WriteLock) makeStaged(dir string) (staged string, err error) {
	if err := l.files().MkdirAll(filepath.Dir(dir), 0o750); err != nil {
		return "", err
	}
	gid := l.gid()
	for d := filepath.Dir(dir); d != l.path; d = filepath.Dir(d) {
		if err := l.setRights(d, true, gid); err != nil {
			return "", err
		}
	}
	// Recovery would take leftovers of a failed removal for a replacement half done.
	if err := l.removeTree(dir + retireSuffix); err != nil {
		return "", err
	}
	staged = dir + stagedSuffix
	if err := l.files().Mkdir(staged, 0o750); err != nil {
		return "", err
	}
	Step("publish:mkdir")
	return staged, nil
}

func (l *WriteLock) dirPath(i Instance) string { return l.Root.dir(i) }

// stage pins everything in the staging directory, with the final permissions.
func (l *WriteLock) stage(staged string, meta Meta, pins Pins) error {
	gid := l.gid()
	of, _ := filepath.Rel(l.path, strings.TrimSuffix(staged, stagedSuffix))
	meta.parts = parts.Of(of, slices.Collect(maps.Keys(pins.Maps)), pins.Optional)
	m, err := meta.create()
	if err != nil {
		return err
	}
	defer m.Close()
	pin := func(name string, p interface{ Pin(string) error }) error {
		path := filepath.Join(staged, name)
		if err := confined.Pin(l.path, path, p); err != nil {
			return fmt.Errorf("pin %s: %w", name, err)
		}
		if err := Try("publish:pin " + name); err != nil {
			return err
		}
		return l.setRights(path, false, gid)
	}
	for _, name := range slices.Sorted(maps.Keys(pins.Maps)) {
		m := pins.Maps[name]
		// Pin would move a map pinned elsewhere. A clone gets a second pin.
		c, err := m.Clone()
		if err != nil {
			return err
		}
		err = pin(mapPrefix+name, c)
		c.Close()
		if err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(pins.Links)) {
		if err := pin(linkPrefix+name, pins.Links[name]); err != nil {
			return err
		}
	}
	if err := pin(metaPin, m); err != nil {
		return err
	}
	return l.setRights(staged, true, gid)
}

// commit moves a complete staging directory into place.
func (l *WriteLock) commit(staged, dir string) error {
	Step("publish:staged")
	err := l.files().Renameat2(staged, dir, unix.RENAME_NOREPLACE)
	if err == nil {
		Step("publish:renamed")
		return nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("move it into place: %w", err)
	}
	err = l.exchange(staged, dir)
	if err == nil {
		Step("publish:exchanged")
		return l.endReplacement(dir, staged) // staged is now the old directory
	}
	if !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("exchange it with the old one: %w", err)
	}
	// Before Linux 5.16 bpffs has no RENAME_EXCHANGE. The first rename records that the staged directory is complete.
	// Recovery continues from there.
	old := dir + retireSuffix
	if err := l.files().Rename(dir, old); err != nil {
		return err
	}
	Step("publish:retired")
	if err := l.files().Rename(staged, dir); err != nil {
		return err
	}
	Step("publish:replaced")
	return l.endReplacement(dir, old)
}

// endReplacement removes the swap record of a replaced instance, then its predecessor. The order matters: recovery takes
// a swap record for an unfinished upgrade only while a second directory exists.
func (l *WriteLock) endReplacement(dir, predecessor string) error {
	if err := l.files().Remove(filepath.Join(dir, swapPin)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	Step("publish:settled")
	return l.removeTree(predecessor)
}

// exchange exchanges two directories. kerneltest.WithoutExchange replaces it in tests.
func (r *Root) exchange(a, b string) error {
	if step.Exchange != nil {
		return step.Exchange(a, b)
	}
	return r.files().Renameat2(a, b, unix.RENAME_EXCHANGE)
}

// Remove removes an instance: first its name, then its pins. A missing instance is not an error.
func (l *WriteLock) Remove(i Instance) error {
	if err := i.validate(); err != nil {
		return err
	}
	dir := l.dirPath(i)
	old := dir + retireSuffix
	l.forget(i)
	if err := l.files().Rename(dir, old); errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("remove %s: %w", i, err)
	}
	Step("remove:retired")
	if err := l.removeTree(old); err != nil {
		return fmt.Errorf("remove %s: %w", i, err)
	}
	return nil
}

// removeTree unpins a directory in a fixed order. First comes the record of an upgrade: without it recovery removes the
// rest. Then come links: no packet may meet a program after its maps are unpinned. Then comes meta, which was pinned
// last: if meta exists, all maps exist.
func (r *Root) removeTree(dir string) error {
	entries, err := r.files().ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	slices.SortStableFunc(entries, func(a, b os.DirEntry) int { return removeOrder(a.Name()) - removeOrder(b.Name()) })
	for _, e := range entries {
		if err := r.files().Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
		Step("remove:unpinned")
	}
	return r.files().Remove(dir)
}

func removeOrder(pin string) int {
	switch {
	case pin == swapPin:
		return 0
	case isLink(pin):
		return 1
	case pin == metaPin:
		return 2
	}
	return 3
}

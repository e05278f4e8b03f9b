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
	"github.com/weir-project/weir/kernel/internal/step"
	"golang.org/x/sys/unix"
)

const (
	metaPin    = "meta"
	mapPrefix  = "map_"
	linkPrefix = "link_"
)

func isLink(pin string) bool { return strings.HasPrefix(pin, linkPrefix) }

// Pins is what an instance consists of beside its meta, by name without prefix.
// A program has no pin of its own: the link that attaches it is the truth.
type Pins struct {
	Maps  map[string]*ebpf.Map
	Links map[string]Link
}

// Publish pins an instance: all of it in a staging directory, which a rename
// then moves into place, over an older instance of the name if there is one.
// Killed at any step, the old state, the new one or none is there, and the next
// Lock clears the rest away.
func (l *WriteLock) Publish(i Instance, meta Meta, pins Pins) error {
	if err := i.validate(); err != nil {
		return err
	}
	dir := l.dirPath(i)
	staged, err := l.makeStaged(dir)
	if err == nil {
		if err = l.stage(staged, meta, pins); err == nil {
			if err = commit(staged, dir); err == nil {
				l.note(i)
			}
		}
		if err != nil {
			err = errors.Join(err, removeTree(staged))
		}
	}
	if err != nil {
		return fmt.Errorf("publishing %s: %w", i, err)
	}
	return nil
}

// makeStaged makes the directory in which an instance is put together.
func (l *WriteLock) makeStaged(dir string) (staged string, err error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o750); err != nil {
		return "", err
	}
	gid := l.gid()
	for d := filepath.Dir(dir); d != l.path; d = filepath.Dir(d) {
		if err := setRights(d, true, gid); err != nil {
			return "", err
		}
	}
	// What a removal that failed left would make recovery take this for a replacement half done.
	if err := removeTree(dir + retireSuffix); err != nil {
		return "", err
	}
	staged = dir + stagedSuffix
	if err := os.Mkdir(staged, 0o750); err != nil {
		return "", err
	}
	Step("publish:mkdir")
	return staged, nil
}

func (l *WriteLock) dirPath(i Instance) string { return l.Root.dir(i) }

// stage pins everything below the staging directory, with its final rights.
func (l *WriteLock) stage(staged string, meta Meta, pins Pins) error {
	gid := l.gid()
	m, err := meta.create()
	if err != nil {
		return err
	}
	defer m.Close()
	pin := func(name string, p interface{ Pin(string) error }) error {
		path := filepath.Join(staged, name)
		if err := p.Pin(path); err != nil {
			return fmt.Errorf("pinning %s: %w", name, err)
		}
		if err := Try("publish:pin " + name); err != nil {
			return err
		}
		return setRights(path, false, gid)
	}
	for _, name := range slices.Sorted(maps.Keys(pins.Maps)) {
		m := pins.Maps[name]
		// Pin moves a map that is pinned elsewhere; a clone is pinned a second time.
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
	return setRights(staged, true, gid)
}

// commit moves a complete staging directory into place.
func commit(staged, dir string) error {
	Step("publish:staged")
	err := unix.Renameat2(unix.AT_FDCWD, staged, unix.AT_FDCWD, dir, unix.RENAME_NOREPLACE)
	if err == nil {
		Step("publish:renamed")
		return nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("moving it into place: %w", err)
	}
	err = exchange(staged, dir)
	if err == nil {
		Step("publish:exchanged")
		return endReplacement(dir, staged) // now the old one
	}
	if !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("exchanging it with the old one: %w", err)
	}
	// Before Linux 5.16 bpffs has no RENAME_EXCHANGE. The first rename is the record that the
	// staged directory is complete: recovery finishes from there.
	old := dir + retireSuffix
	if err := os.Rename(dir, old); err != nil {
		return err
	}
	Step("publish:retired")
	if err := os.Rename(staged, dir); err != nil {
		return err
	}
	Step("publish:replaced")
	return endReplacement(dir, old)
}

// endReplacement ends a replacement: the instance forgets that it was one, then its
// predecessor goes. In this order: recover takes the record of a swap for one that
// may be unfinished only while a second directory is there.
func endReplacement(dir, predecessor string) error {
	if err := os.Remove(filepath.Join(dir, swapPin)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	Step("publish:settled")
	return removeTree(predecessor)
}

// exchange exchanges two directories. Tests replace it by kerneltest.WithoutExchange.
func exchange(a, b string) error {
	if step.Exchange != nil {
		return step.Exchange(a, b)
	}
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}

// Remove takes an instance away: its name first, then what it holds. Removing
// what is not there is no error.
func (l *WriteLock) Remove(i Instance) error {
	if err := i.validate(); err != nil {
		return err
	}
	dir := l.dirPath(i)
	old := dir + retireSuffix
	l.forget(i)
	if err := os.Rename(dir, old); errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("removing %s: %w", i, err)
	}
	Step("remove:retired")
	if err := removeTree(old); err != nil {
		return fmt.Errorf("removing %s: %w", i, err)
	}
	return nil
}

// removeTree unpins a directory. The record of an upgrade goes first: without it
// recovery removes the rest. Then links: traffic must stop meeting a program before
// its maps lose their names. Then meta, which was pinned last: where there is a
// meta, every map is there.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	slices.SortStableFunc(entries, func(a, b os.DirEntry) int { return removeOrder(a.Name()) - removeOrder(b.Name()) })
	for _, e := range entries {
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
		Step("remove:unpinned")
	}
	return os.Remove(dir)
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

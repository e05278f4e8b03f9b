// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/kernel/internal/confined"
	"golang.org/x/sys/unix"
)

// swapPin is the record of an upgrade in its staging directory. Recovery learns from it whether the attachment runs the
// new program.
const swapPin = "swap"

// Upgrade describes the new form of a published instance with another program.
type Upgrade struct {
	Meta Meta
	// Pins are all maps of the new form, including kept ones, and its links attached beside the old form's. Other pins
	// of the old form are removed.
	Pins Pins
	// Link names the link to be moved to Program atomically.
	Link    string
	Program *ebpf.Program
	// Keep, with Swap, names links of the old form to keep. Swap moves their attachments to the new program.
	Keep []string
	// Swap replaces Link for attachments without a link. It replaces the old program by the new one at every attachment.
	// A kill during Swap counts as success: the next command finds the new pins published, and must attach where the
	// program is missing. On failure Swap must undo its changes.
	Swap func() error
}

// swapRecord is the value of swapPin, in host byte order.
type swapRecord struct {
	Program uint32   // ID of the link's new program; 0: there is no link
	Begun   uint32   // without a link: 1 before the first attachment changes
	Link    [24]byte // name of the link, NUL-padded
}

// Upgrade replaces an instance under traffic. It pins the new form in a staging directory, moves the attachment to the
// new program atomically, and moves the directory into place. The attachment decides after a kill: before its move the
// old form stays, and after it the next Lock finishes. Every packet meets one complete form.
func (l *WriteLock) Upgrade(i Instance, u Upgrade) error {
	if err := i.validate(); err != nil {
		return err
	}
	if err := l.upgrade(l.dirPath(i), u); err != nil {
		return fmt.Errorf("upgrade %s: %w", i, err)
	}
	l.note(i)
	return nil
}

func (l *WriteLock) upgrade(dir string, u Upgrade) error {
	if _, err := os.Stat(filepath.Join(dir, metaPin)); err != nil {
		return l.explainOpen(dir, err)
	}
	rec, swap := swapRecord{}, u.Swap
	links := map[string]Link{}
	maps.Copy(links, u.Pins.Links)
	u.Pins.Links = links
	keep := slices.Clone(u.Keep)
	if u.Link != "" {
		keep = append(keep, u.Link)
	}
	for _, name := range keep {
		ln, err := confined.LoadLink(l.path, filepath.Join(dir, linkPrefix+name))
		if err != nil {
			return err
		}
		defer ln.Close()
		links[name] = ln
	}
	if u.Link != "" {
		var err error
		if rec, err = newSwapRecord(u.Link, u.Program); err != nil {
			return err
		}
		swap = func() error { return replaceProgram(links[u.Link], u.Program) }
	}
	staged, err := l.makeStaged(dir)
	if err != nil {
		return err
	}
	if err := l.goOver(staged, u, rec, swap); err != nil {
		return errors.Join(err, l.removeTree(staged))
	}
	Step("upgrade:swapped")
	if err := l.commit(staged, dir); err != nil {
		return fmt.Errorf("the new program runs, but its pins are not in place yet: the next weir command moves them: %w", err)
	}
	return nil
}

// goOver completes the staging directory and moves the attachment.
func (l *WriteLock) goOver(staged string, u Upgrade, rec swapRecord, swap func() error) error {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: swapPin, Type: ebpf.Array, KeySize: 4, ValueSize: 32, MaxEntries: 1})
	if err != nil {
		return explainLoad("create the upgrade record", err)
	}
	defer m.Close()
	path := filepath.Join(staged, swapPin)
	if err := errors.Join(m.Put(uint32(0), rec), confined.Pin(l.path, path, m), l.setRights(path, false, l.gid())); err != nil {
		return fmt.Errorf("record the upgrade: %w", err)
	}
	Step("upgrade:recorded")
	if err := l.stage(staged, u.Meta, u.Pins); err != nil {
		return err
	}
	Step("upgrade:staged")
	if u.Link == "" {
		rec.Begun = 1
		if err := m.Put(uint32(0), rec); err != nil {
			return fmt.Errorf("record the upgrade: %w", err)
		}
		Step("upgrade:begun")
	}
	return swap()
}

func newSwapRecord(name string, p *ebpf.Program) (rec swapRecord, err error) {
	info, err := p.Info()
	if err != nil {
		return rec, err
	}
	id, ok := info.ID()
	if !ok || len(name) >= len(rec.Link) {
		return rec, fmt.Errorf("link %s: its program has no ID, or its name is too long", name)
	}
	rec.Program = uint32(id)
	copy(rec.Link[:], name)
	return rec, nil
}

// goneOver reports whether the attachment runs the program of a staging directory.
func (r *Root) goneOver(staged string) (bool, error) {
	m, err := confined.LoadMap(r.path, filepath.Join(staged, swapPin), nil)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil // not an upgrade
	} else if err != nil {
		return false, err
	}
	defer m.Close()
	var rec swapRecord
	if err := m.Lookup(uint32(0), &rec); err != nil {
		return false, err
	}
	if rec.Program == 0 {
		return rec.Begun != 0, nil
	}
	name := string(bytes.TrimRight(rec.Link[:], "\x00"))
	ln, err := confined.LoadLink(r.path, filepath.Join(staged, linkPrefix+name))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil // killed before it was pinned
	} else if err != nil {
		return false, err
	}
	defer ln.Close()
	info, err := ln.Info()
	return err == nil && uint32(info.Program) == rec.Program, err
}

// replaceProgram moves a link to another program atomically. It fails if another writer has changed the link's program
// meanwhile.
func replaceProgram(ln Link, p *ebpf.Program) error {
	info, err := ln.Info()
	if err != nil {
		return err
	}
	old, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return fmt.Errorf("open the attached program: %w", err)
	}
	defer old.Close()
	raw, ok := ln.(interface {
		UpdateArgs(link.RawLinkUpdateOptions) error
	})
	if !ok {
		return fmt.Errorf("%w: a link of type %T cannot be moved to another program", ErrUnsupported, ln)
	}
	return raw.UpdateArgs(link.RawLinkUpdateOptions{New: p, Old: old, Flags: unix.BPF_F_REPLACE})
}

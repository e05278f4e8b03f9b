// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// AddLink pins one more link of a published instance, such as that of a device
// that came later. The link is there or not: readers see no half of it.
func (l *WriteLock) AddLink(i Instance, name string, ln Link) error {
	if err := l.addLink(i, name, ln); err != nil {
		return err
	}
	l.noteOne(i, func(rec *record) { rec.noteLink(name, ln) })
	return nil
}

func (l *WriteLock) addLink(i Instance, name string, ln Link) error {
	path := filepath.Join(l.dirPath(i), linkPrefix+name)
	if err := ln.Pin(path); err != nil {
		return fmt.Errorf("pinning link %s of %s: %w", name, i, err)
	}
	Step("link:pinned")
	return setRights(path, false, l.gid())
}

// RemoveLink detaches one link of a published instance and takes it away. The
// kernel lets go of a link that is only unpinned in its own time; this one does not
// run any more when RemoveLink returns. A link that is gone is no error.
func (l *WriteLock) RemoveLink(i Instance, name string) error {
	path := filepath.Join(l.dirPath(i), linkPrefix+name)
	l.noteOne(i, func(rec *record) { delete(rec.Links, name) })
	if ln, err := link.LoadPinnedLink(path, nil); err == nil {
		_ = ln.Detach() // its device may be gone, or the kernel only unpin such links
		ln.Close()
		Step("link:detached")
	}
	err := os.Remove(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing link %s of %s: %w", name, i, err)
	}
	Step("link:removed")
	return nil
}

// LinkProgram is the id of the program that a link runs.
func LinkProgram(ln Link) (uint32, error) {
	info, err := ln.Info()
	if err != nil {
		return 0, err
	}
	return uint32(info.Program), nil
}

// OpenProgramMaps opens the maps of a program by their names in the kernel, of at most 15 characters. The caller closes them.
func OpenProgramMaps(program uint32) (out map[string]*ebpf.Map, err error) {
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(program))
	if err != nil {
		return nil, fmt.Errorf("program %d: %w", program, err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return nil, fmt.Errorf("program %d: %w", program, err)
	}
	ids, _ := info.MapIDs()
	out = map[string]*ebpf.Map{}
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err == nil {
			var i *ebpf.MapInfo
			if i, err = m.Info(); err == nil {
				out[i.Name] = m
				continue
			}
			m.Close()
		}
		for _, m := range out {
			m.Close()
		}
		return nil, fmt.Errorf("map %d of program %d: %w", id, program, err)
	}
	return out, nil
}

// MoveLink has a link run another program in one step: a packet meets the one or
// the other.
func MoveLink(ln Link, p *ebpf.Program) error { return replaceProgram(ln, p) }

// LinkFD is a link's descriptor, which is the link's: for whoever keeps another one of it.
func LinkFD(ln Link) (int, error) {
	f, ok := ln.(interface{ FD() int })
	if !ok {
		return -1, fmt.Errorf("a link of type %T tells no descriptor", ln)
	}
	return f.FD(), nil
}

// LinkFrom is the link of a descriptor that somebody kept. It closes the file, also where it fails.
func LinkFrom(f *os.File) (Link, error) {
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("a link that was kept: %w", err)
	}
	ln, err := link.NewFromFD(fd)
	if err != nil {
		return nil, fmt.Errorf("a link that was kept: %w", err)
	}
	return ln, nil
}

// programPin is where a program is pinned while something is told its path.
const programPin = "prog_attaching"

// WithPinned pins a program beside a published instance while f runs: some places
// take a program only by its path. Killed meanwhile, the next Lock
// takes the pin away.
func (l *WriteLock) WithPinned(i Instance, p *ebpf.Program, f func(path string) error) error {
	path := filepath.Join(l.dirPath(i), programPin)
	c, err := p.Clone() // pinning would tie the program to this path
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Pin(path); err != nil {
		return fmt.Errorf("pinning the program of %s: %w", i, err)
	}
	defer os.Remove(path)
	Step("program:pinned")
	return f(path)
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/kernel/internal/confined"
	"golang.org/x/sys/unix"
)

// AddLink pins one more link of a published instance, for example of a new device. The pin appears atomically.
func (l *WriteLock) AddLink(i Instance, name string, ln Link) error {
	if err := l.addLink(i, name, ln); err != nil {
		return err
	}
	l.noteOne(i, func(rec *record) { rec.noteLink(name, ln) })
	return nil
}

func (l *WriteLock) addLink(i Instance, name string, ln Link) error {
	path := filepath.Join(l.dirPath(i), linkPrefix+name)
	if err := confined.Pin(l.path, path, ln); err != nil {
		return fmt.Errorf("pin link %s of %s: %w", name, i, err)
	}
	Step("link:pinned")
	return l.setRights(path, false, l.gid())
}

// RemoveLink detaches a link of a published instance and removes its pin. The kernel releases an unpinned link
// asynchronously. An explicit detach ends it before RemoveLink returns. A missing link is not an error. A link with a
// foreign program is only unpinned: it may be a second name of another program's pin.
func (l *WriteLock) RemoveLink(i Instance, name string) error {
	path := filepath.Join(l.dirPath(i), linkPrefix+name)
	l.noteOne(i, func(rec *record) { delete(rec.Links, name) })
	if ln, err := confined.LoadLink(l.path, path); err == nil {
		if NewChecker(l.Root).runsOwnLink(i, ln) {
			_ = ln.Detach() // the device may be gone, or the kernel may only support unpinning
		}
		ln.Close()
		Step("link:detached")
	}
	err := l.files().Remove(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove link %s of %s: %w", name, i, err)
	}
	Step("link:removed")
	return nil
}

// LinkProgram returns the ID of a link's program.
func LinkProgram(ln Link) (uint32, error) {
	info, err := ln.Info()
	if err != nil {
		return 0, err
	}
	return uint32(info.Program), nil
}

// OpenProgramMaps opens the maps of a program. The keys are their names in the kernel, truncated to 15 characters. The
// caller closes the maps.
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

// MoveLink replaces a link's program atomically: a packet meets the old program or the new one.
func MoveLink(ln Link, p *ebpf.Program) error { return replaceProgram(ln, p) }

// LinkFD returns a link's descriptor, for duplication. The link keeps it.
func LinkFD(ln Link) (int, error) {
	f, ok := ln.(interface{ FD() int })
	if !ok {
		return -1, fmt.Errorf("link of type %T has no descriptor", ln)
	}
	return f.FD(), nil
}

// LinkFrom returns the link of a stored descriptor. It always closes the file.
func LinkFrom(f *os.File) (Link, error) {
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open kept link: %w", err)
	}
	ln, err := link.NewFromFD(fd)
	if err != nil {
		return nil, fmt.Errorf("open kept link: %w", err)
	}
	return ln, nil
}

// programPin is the temporary pin of a program, for tools that take a path.
const programPin = "prog_attaching"

// WithPinned pins a program beside a published instance while f runs: some tools take a program only by path. After a
// kill the next Lock removes the pin.
func (l *WriteLock) WithPinned(i Instance, p *ebpf.Program, f func(path string) error) error {
	path := filepath.Join(l.dirPath(i), programPin)
	c, err := p.Clone() // pinning would tie the program to this path
	if err != nil {
		return err
	}
	defer c.Close()
	if err := confined.Pin(l.path, path, c); err != nil {
		return fmt.Errorf("pin the program of %s: %w", i, err)
	}
	defer func() { _ = l.files().Remove(path) }()
	Step("program:pinned")
	return f(path)
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"net"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/kernel"
)

// hook is an attachment of a program at a device.
type hook struct {
	at      kernel.TCX
	program string
}

// keeper stores links: in pins, or in this process.
type keeper interface {
	names() ([]string, error)
	attached(name string, at kernel.Attachment) bool
	add(name string, ln kernel.Link) error
	move(name string, to *ebpf.Program) error
	remove(name string) error
}

type pinned struct {
	l *kernel.WriteLock
	o *kernel.Opened
}

func (p pinned) names() ([]string, error) { return p.o.Links() }
func (p pinned) add(name string, ln kernel.Link) error {
	defer ln.Close()
	return p.l.AddLink(p.o.Instance, name, ln)
}
func (p pinned) remove(name string) error { return p.l.RemoveLink(p.o.Instance, name) }

func (p pinned) move(name string, to *ebpf.Program) error {
	ln, err := p.o.Link(name)
	if err != nil {
		return err
	}
	defer ln.Close()
	return kernel.MoveLink(ln, to)
}

func (p pinned) attached(name string, at kernel.Attachment) bool {
	ln, err := p.o.Link(name)
	if err != nil {
		return false
	}
	defer ln.Close()
	return at.Verify(ln) == nil
}

// attach attaches the wanted programs and detaches all others. With anew it also replaces the attached ones by this
// weir's.
func (e *Engine) attach(l *kernel.WriteLock, want map[string]hook, anew bool) error {
	var k keeper = e.unpinned
	if e.unpinned == nil {
		o, err := l.Open(e.instance, "clock")
		if err != nil {
			return err
		}
		defer o.Close()
		k = pinned{l, o}
	}
	have, err := k.names()
	if err != nil {
		return err
	}
	moves := map[string]hook{}
	for _, name := range have {
		if h, wanted := want[name]; wanted && k.attached(name, h.at) {
			delete(want, name)
			if anew {
				moves[name] = h
			}
			continue
		}
		if err := k.remove(name); err != nil {
			return err
		}
	}
	if len(want)+len(moves) == 0 {
		return nil
	}
	programs, err := e.load()
	if err != nil {
		return err
	}
	defer programs.Close()
	for name, h := range moves {
		if err := k.move(name, programs.Programs[h.program]); err != nil {
			return fmt.Errorf("replacing the program of %s: %w", name, err)
		}
		kernel.Step("bfd:moved")
	}
	for name, h := range want {
		if h.program != bpf.BfdProgBfdTick {
			if _, err := net.InterfaceByIndex(h.at.Ifindex); err != nil {
				continue // the device is gone: its sessions wait
			}
		}
		ln, err := h.at.Attach(programs.Programs[h.program])
		if err != nil {
			return err
		}
		if err := k.add(name, ln); err != nil {
			return err
		}
	}
	return nil
}

func (e *Engine) load() (*kernel.Collection, error) {
	spec, err := bpf.LoadBfd()
	if err != nil {
		return nil, err
	}
	share := map[string]*ebpf.Map{bpf.BfdMapLivenessShared: e.stalls}
	for pin, name := range pins {
		share[name] = e.maps[pin]
	}
	return kernel.Load(spec, []string{bpf.BfdProgBfdTick, bpf.BfdProgBfdReceive, bpf.BfdProgBfdLeave}, share)
}

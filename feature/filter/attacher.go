// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/kernel"
)

// attacherName is the kind of attacher of a filter's program.
type attacherName string

const (
	attacherXDP       attacherName = "xdp"
	attacherTCX       attacherName = "tcx"
	attacherClsact    attacherName = "clsact"
	attacherNetfilter attacherName = "netfilter"
	attacherNFT       attacherName = "nft"
)

var attachers = []attacherName{attacherXDP, attacherTCX, attacherClsact, attacherNetfilter, attacherNFT}

// attacher attaches a filter's program to its locations.
type attacher interface {
	// attach creates links for an unpublished form at all existing locations. The caller closes
	// them. Attachers without links return nil.
	attach(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) (map[string]kernel.Link, error)
	// enter attaches prog to locations new in this form, for attachers without links. On failure it
	// undoes its changes.
	enter(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) error
	// move makes all attachments of the published form run prog. On failure it undoes its changes.
	move(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) error
	// reconcile attaches prog where an attachment of the published form is missing, and removes
	// superfluous attachments. It may be repeated.
	reconcile(s *instance, prog *ebpf.Program) error
	// attachments returns the state of each attachment.
	attachments(s *instance) ([]Attachment, error)
	// clear removes the attachments of form, the current form of s or a former one, at once. It
	// needs the pins and so runs before their removal. (The links of a form also end with its
	// pins.)
	clear(s *instance, form *published) error
}

// Attachment is a location of a filter, attached or not.
type Attachment struct {
	Name      string `json:"location"` // like "tcx ingress of eth0"
	Interface string `json:"interface,omitempty"`
	Attached  bool   `json:"attached"`
	Problem   string `json:"problem,omitempty"`
	// Position is the position among the programs of an ordered hook, if the caller may read it.
	Position *hookorder.Position `json:"position,omitempty"`

	lacks     bool // can be attached now
	stale     bool // runs the program of an earlier form
	misplaced bool // position differs from order
	stray     bool // at an interface not named by the filter: it was renamed
	pin       string
	program   uint32
}

// Problems of attachments.
const (
	problemLacks  = "not attached, because it was detached or the interface is new: weir apply attaches it"
	problemUnseen = "attachment unknown: only root can read it"
	problemStale  = "runs outdated rules, because the last change was killed: weir apply recovers it"
)

func (p *Attachment) lack() { p.lacks, p.Problem = true, problemLacks }

// check updates the attachment from its program: 0 if none is attached.
func (p *Attachment) check(s *instance, program uint32) error {
	if program == 0 {
		p.lack()
		return nil
	}
	p.Attached = true
	ok, err := s.current(program)
	if errors.Is(err, os.ErrPermission) {
		return nil // the caller may not read it
	}
	if err == nil && !ok {
		p.stale, p.Problem = true, problemStale
	}
	return err
}

// chooseAttacher returns the attacher for the filter's hook on this kernel.
func (f Filter) chooseAttacher() attacherName {
	switch f.Hook {
	case HookXDP, HookXDPGeneric:
		return attacherXDP
	case HookNetfilter:
		return attacherNetfilter
	case HookNFT:
		return attacherNFT
	case HookTCX:
		if kernel.TCXLink.Check() == nil {
			return attacherTCX
		}
	}
	return attacherClsact
}

func (n attacherName) attacher() attacher {
	switch n {
	case attacherXDP, attacherTCX:
		return deviceLinks{}
	case attacherNetfilter:
		return netfilterLinks{}
	case attacherNFT:
		return nftRule{}
	}
	return tcFilters{}
}

// sameAttachment reports whether two forms have the same attacher, hook and position. Their
// interfaces may differ.
func sameAttachment(a, b *published) bool {
	f, g := a.Filter, b.Filter
	return a.Attacher == b.Attacher && f.Hook == g.Hook && f.Direction == g.Direction && f.At == g.At && f.Priority == g.Priority &&
		f.Order.Order == g.Order.Order
}

// undo is a list of steps to revert a failed change, run in reverse order.
type undo []func() error

func (u *undo) add(f func() error) { *u = append(*u, f) }

func (u undo) run(err error) error {
	for i := len(u) - 1; i >= 0; i-- {
		if e := u[i](); e != nil {
			err = errors.Join(err, fmt.Errorf("restore the previous rules: %w", e))
		}
	}
	return err
}

// former opens the program of an attachment, to restore it on failure.
func former(id uint32) (*ebpf.Program, error) {
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
	if err != nil {
		return nil, fmt.Errorf("open the attached program: %w", err)
	}
	return p, nil
}

// devicePin returns the pin name of a device's link.
func devicePin(index int) string { return fmt.Sprintf("dev%d", index) }

func isDevicePin(pin string) bool { return strings.HasPrefix(pin, "dev") }

// absent returns the state of an attachment to an absent or unsuitable interface.
func absent(kind, device, why string) Attachment {
	return Attachment{Name: kind + " of " + device, Interface: device, Problem: why}
}

// strays returns the attachments to existing interfaces not named by the filter. indices are the indices of the
// attached interfaces, kind describes the hook.
func (s *instance) strays(kind string, indices []int) (out []Attachment, err error) {
	return out, s.ns.Do(func() error {
		for _, index := range indices {
			l, err := netlink.LinkByIndex(index)
			if errors.As(err, new(netlink.LinkNotFoundError)) {
				continue // its attachment went with it
			} else if err != nil {
				return err
			}
			name := l.Attrs().Name
			if slices.Contains(s.pub.Filter.Interfaces, name) {
				continue
			}
			out = append(out, Attachment{Name: kind + " of " + name, Interface: name, Attached: true, stray: true,
				Problem: "still attached, but the filter does not name this interface, perhaps renamed: weir serve, or weir apply, takes the filter off"})
		}
		return nil
	})
}

func permission(err error) bool { return errors.Is(err, os.ErrPermission) }

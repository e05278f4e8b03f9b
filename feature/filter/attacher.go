// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/kernel"
)

// attacherName says what attaches a filter's program.
type attacherName string

const (
	attacherXDP       attacherName = "xdp"
	attacherTCX       attacherName = "tcx"
	attacherClsact    attacherName = "clsact"
	attacherNetfilter attacherName = "netfilter"
	attacherNFT       attacherName = "nft"
)

// attacher attaches a filter's program to its attachments.
type attacher interface {
	// attach makes the links of a form that is not published yet, at all locations that
	// are there. The caller closes them. Holders without links make none.
	attach(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) (map[string]kernel.Link, error)
	// enter attaches prog to locations that the form before had not, where attach makes no
	// links for them. When it fails it has undone what it did.
	enter(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) error
	// move has all attachments that the published form has run prog from now on. When it
	// fails it has undone what it did.
	move(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) error
	// reconcile attaches prog where the published form lacks an attachment, and takes away
	// attachments that it is not to have. It may be repeated.
	reconcile(s *instance, prog *ebpf.Program) error
	// attachments tells of the attachments.
	attachments(s *instance) ([]Attachment, error)
	// clear takes the attachments away, of a form that s has or once had: before the pins go,
	// by which they are known, and at once. (A form's links end with its pins, too.)
	clear(s *instance, form *published) error
}

// Attachment is where a filter is attached, or should be.
type Attachment struct {
	Name      string `json:"location"` // like "tcx ingress of eth0"
	Interface string `json:"interface,omitempty"`
	Attached  bool   `json:"attached"`
	Problem   string `json:"problem,omitempty"`
	// Position is among the programs at the hook, where it has an order and the reader may see it.
	Position *hookorder.Position `json:"position,omitempty"`

	lacks     bool // it could be attached now
	stale     bool // it runs the program of an earlier form
	misplaced bool // not where order asks for
	pin       string
	program   uint32
}

// Problems of attachments.
const (
	problemLacks  = "not attached, somebody took it away or the interface came later: weir apply attaches it"
	problemUnseen = "only root can see whether it is attached"
	problemStale  = "it runs the rules before the last change, which was killed: weir apply recovers it"
)

func (p *Attachment) lack() { p.lacks, p.Problem = true, problemLacks }

// check says what an attachment's program makes of it.
func (p *Attachment) check(s *instance, program uint32) error {
	if program == 0 {
		p.lack()
		return nil
	}
	p.Attached = true
	ok, err := s.current(program)
	if errors.Is(err, os.ErrPermission) {
		return nil // what a reader may not ask
	}
	if err == nil && !ok {
		p.stale, p.Problem = true, problemStale
	}
	return err
}

// chooseAttacher says what is to hold a filter's program on this kernel.
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

// sameAttachment says whether a change from one form to the other leaves the attachments
// what they are, but for interfaces.
func sameAttachment(a, b *published) bool {
	f, g := a.Filter, b.Filter
	return a.Attacher == b.Attacher && f.Hook == g.Hook && f.Direction == g.Direction && f.At == g.At && f.Priority == g.Priority &&
		f.Order.Order == g.Order.Order
}

// undo runs in reverse order what a change that failed has done.
type undo []func() error

func (u *undo) add(f func() error) { *u = append(*u, f) }

func (u undo) run(err error) error {
	for i := len(u) - 1; i >= 0; i-- {
		if e := u[i](); e != nil {
			err = errors.Join(err, fmt.Errorf("and the rules before could not be put back: %w", e))
		}
	}
	return err
}

// former opens the program that an attachment runs, so that it can be put back.
func former(id uint32) (*ebpf.Program, error) {
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
	if err != nil {
		return nil, fmt.Errorf("the program that is attached: %w", err)
	}
	return p, nil
}

// devicePin is the name of the link of a device.
func devicePin(index int) string { return fmt.Sprintf("dev%d", index) }

func isDevicePin(pin string) bool { return strings.HasPrefix(pin, "dev") }

// absent is the attachment on an interface that the filter cannot be attached to.
func absent(kind, device, why string) Attachment {
	return Attachment{Name: kind + " of " + device, Interface: device, Problem: why}
}

func permission(err error) bool { return errors.Is(err, os.ErrPermission) }

// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"golang.org/x/sys/unix"
)

// netfilterLinks attaches a program to a netfilter hook. The kernel cannot update the program of a
// netfilter link. The links therefore run a dispatcher, and the program is in its slot.
type netfilterLinks struct{}

// slotMap is the pin of the dispatcher's slot.
const slotMap = "slot"

var families = []struct {
	pin    string
	family uint8
}{{"ipv4", unix.NFPROTO_IPV4}, {"ipv6", unix.NFPROTO_IPV6}}

func (netfilterLinks) at(f Filter, family uint8) kernel.Netfilter {
	return kernel.Netfilter{Family: family, Hook: points[f.At], Priority: f.Priority}
}

func (n netfilterLinks) attach(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) (map[string]kernel.Link, error) {
	out := map[string]kernel.Link{}
	if err := n.move(s, maps, prog); err != nil {
		return out, err
	}
	for _, fam := range families {
		ln, err := n.attachOne(s, maps, fam.family)
		if errors.Is(err, kernel.ErrUnsupported) && fam.family == unix.NFPROTO_IPV6 {
			continue // a kernel without IPv6
		}
		if err != nil {
			return out, err
		}
		out[fam.pin] = ln
	}
	return out, nil
}

func (n netfilterLinks) attachOne(s *instance, maps map[string]*ebpf.Map, family uint8) (ln kernel.Link, err error) {
	run, err := kernel.Dispatcher{Slot: maps[slotMap]}.Load("filter_dispatch")
	if err != nil {
		return nil, err
	}
	defer run.Close()
	err = s.ns.Do(func() error { ln, err = n.at(s.pub.Filter, family).Attach(run); return err })
	return ln, err
}

func (netfilterLinks) move(_ *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) error {
	if err := (kernel.Dispatcher{Slot: maps[slotMap]}).Set(prog); err != nil {
		return err
	}
	kernel.Step("filter:moved")
	return nil
}

func (n netfilterLinks) reconcile(s *instance, prog *ebpf.Program) error {
	if err := n.move(s, s.pins.Maps, prog); err != nil {
		return err
	}
	attachments, err := n.attachments(s)
	if err != nil {
		return err
	}
	for i, p := range attachments {
		if !p.lacks {
			continue
		}
		ln, err := n.attachOne(s, s.pins.Maps, families[i].family)
		if errors.Is(err, kernel.ErrUnsupported) && i > 0 {
			continue
		}
		if err != nil {
			return err
		}
		err = errors.Join(s.lock.RemoveLink(s.inst, p.pin), s.lock.AddLink(s.inst, p.pin, ln))
		ln.Close()
		if err != nil {
			return err
		}
		kernel.Step("filter:attached")
	}
	return nil
}

func (n netfilterLinks) attachments(s *instance) ([]Attachment, error) {
	program, err := kernel.Dispatcher{Slot: s.pins.Maps[slotMap]}.Program()
	if err != nil {
		return nil, err
	}
	var out []Attachment
	for _, fam := range families {
		a := n.at(s.pub.Filter, fam.family)
		p := Attachment{Name: a.String(), pin: fam.pin}
		if err := p.checkDispatcher(s, a, program); err != nil {
			return nil, err
		}
		if p.lacks && fam.family == unix.NFPROTO_IPV6 && !hasIPv6() {
			continue
		}
		out = append(out, p)
	}
	return out, nil
}

// hasIPv6 reports whether the kernel supports IPv6.
func hasIPv6() bool {
	_, err := os.Stat("/proc/net/if_inet6")
	return err == nil
}

// checkDispatcher is checkLink for links running a dispatcher.
func (p *Attachment) checkDispatcher(s *instance, a kernel.Attachment, program uint32) error {
	ln, err := s.pins.Link(p.pin)
	if err == nil {
		err = a.Verify(ln)
		ln.Close()
	}
	switch {
	case errors.Is(err, kernel.ErrNotExist), errors.Is(err, kernel.ErrDetached):
		p.lack()
		return nil
	case err != nil && !permission(err):
		return err
	}
	return p.check(s, program)
}

func (netfilterLinks) enter(*instance, map[string]*ebpf.Map, *ebpf.Program) error { return nil }

func (netfilterLinks) clear(s *instance, _ *published) error { return s.dropLinks() }

// nftRule attaches a program by an nftables rule, in a table of weir. It has no link: the comment
// of the rule identifies the filter's form.
type nftRule struct{}

func (nftRule) at(f Filter) hook.NFT {
	return hook.NFT{Table: "weir_" + f.Name, Hook: points[f.At], Priority: f.Priority}
}

func (nftRule) attach(*instance, map[string]*ebpf.Map, *ebpf.Program) (map[string]kernel.Link, error) {
	return nil, nil
}

// note returns the comment of the rule, for users listing the ruleset and for
// [nftRule.attachments].
func note(f Filter, counts ebpf.MapID) string {
	return fmt.Sprintf("filter %s of weir, map %d: weir filter list", f.Name, counts)
}

func (n nftRule) move(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) error {
	info, err := maps["counts"].Info()
	if err != nil {
		return err
	}
	id, _ := info.ID()
	return s.lock.WithPinned(s.inst, prog, func(path string) error {
		return s.ns.Do(func() error { return n.at(s.pub.Filter).Attach(path, note(s.pub.Filter, id)) })
	})
}

func (n nftRule) enter(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) error {
	return n.move(s, maps, prog)
}

func (n nftRule) reconcile(s *instance, prog *ebpf.Program) error {
	attachments, err := n.attachments(s)
	if err != nil || !attachments[0].lacks && !attachments[0].stale {
		return err
	}
	return n.move(s, s.pins.Maps, prog)
}

func (n nftRule) attachments(s *instance) ([]Attachment, error) {
	p := Attachment{Name: n.at(s.pub.Filter).String()}
	id, err := s.countsID()
	if err != nil {
		return nil, err
	}
	var have string
	var ok bool
	err = s.ns.Do(func() (err error) { have, ok, err = n.at(s.pub.Filter).Note(); return err })
	switch {
	case permission(err):
		p.Problem = problemUnseen
	case err != nil:
		return nil, err
	case !ok:
		p.lack()
	default:
		p.Attached = true
		if have != note(s.pub.Filter, id) {
			p.stale, p.Problem = true, problemStale
		}
	}
	return []Attachment{p}, nil
}

func (n nftRule) clear(s *instance, form *published) error {
	return s.ns.Do(func() error { return n.at(form.Filter).Detach() })
}

// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// published is a filter as recorded in its pins. The record is authoritative for attachments.
type published struct {
	Filter   Filter           `json:"filter"`        // defaults filled in
	Netns    string           `json:"netns"`         // namespace as named by the user
	Attacher attacherName     `json:"attacher"`      // kind of attacher
	Raw      bool             `json:"raw,omitempty"` // devices have no link header: tunnels
	Lists    map[string]*list `json:"lists,omitempty"`
	Before   []string         `json:"before,omitempty"` // keys of the rules counted in map_before, by index
	// Was is the previous form if its attacher had no links and the attachment changed. A killed
	// command may have left its attachments in place.
	Was *published `json:"was,omitempty"`

	meta kernel.Meta
}

// filters is the store of filter instances. Each has its own object: the compiled rules.
var filters = instances.Store[published]{Feature: Name, ABI: abi, Ref: func(p *published) string { return p.Netns },
	Fill: func(p *published) error {
		p.Filter = p.Filter.withDefaults()
		if !slices.Contains(attachers, p.Attacher) { // of a version between two releases
			return fmt.Errorf("attacher %q is unknown to this version", p.Attacher)
		}
		return nil
	}}

// publishedFrom returns the filter of a record.
func publishedFrom(rec instances.Record[published]) *published {
	p := rec.Spec
	p.meta = rec.Meta
	return &p
}

// instance is a filter in its namespace.
type instance struct {
	lock *kernel.WriteLock // nil for readers
	inst kernel.Instance
	pub  *published
	pins *kernel.Opened // nil before publication
	ns   *netns.Handle
}

// openInstance opens a published filter for writing.
func openInstance(l *kernel.WriteLock, i kernel.Instance) (*instance, error) {
	u, err := filters.Open(l, i)
	if err != nil {
		return nil, err
	}
	return &instance{lock: l, inst: i, pub: publishedFrom(u.Record), pins: u.Pins, ns: u.Netns}, nil
}

// findNetns opens the namespace of a published filter.
func findNetns(p *published) (*netns.Handle, error) { return netns.Find(p.Netns, p.meta.ID()) }

// Close releases descriptors. All pins stay.
func (s *instance) Close() {
	if s.pins != nil {
		s.pins.Close()
	}
	if s.ns != nil {
		s.ns.Close()
	}
}

// reopen opens the pins again after publication.
func (s *instance) reopen() error {
	pins, err := s.lock.Open(s.inst)
	if err != nil {
		return err
	}
	if s.pins != nil {
		s.pins.Close()
	}
	s.pins = pins
	return nil
}

// current reports whether a program belongs to the published form. Only that program uses the
// form's map of counts.
func (s *instance) current(program uint32) (bool, error) {
	id, err := s.countsID()
	if err != nil {
		return false, err
	}
	return kernel.ProgramUses(program, id)
}

func (s *instance) countsID() (ebpf.MapID, error) {
	info, err := s.pins.Maps["counts"].Info()
	if err != nil {
		return 0, err
	}
	id, ok := info.ID()
	if !ok {
		return 0, errors.New("the kernel does not report map ids")
	}
	return id, nil
}

// headers maps device types to whether they have an Ethernet header, as in dev_is_mac_header_xmit
// (include/linux/if_arp.h).
var headers = map[string]bool{"ether": true, "loopback": true, "none": false, "void": false, "ipip": false, "tunnel6": false, "sit": false,
	"gre": false, "ipgre": false, "ip6gre": false, "ppp": false, "rawip": false}

// interfaces returns the filter's existing interfaces by name.
func (s *instance) interfaces() (map[string]*netlink.LinkAttrs, error) {
	var links []netlink.Link
	err := s.ns.Do(func() (err error) { links, err = dump.LinkList(); return err })
	if err != nil {
		return nil, fmt.Errorf("list the interfaces of %s: %w", s.ns, err)
	}
	out := map[string]*netlink.LinkAttrs{}
	for _, l := range links {
		if slices.Contains(s.pub.Filter.Interfaces, l.Attrs().Name) {
			out[l.Attrs().Name] = l.Attrs()
		}
	}
	return out, nil
}

// devices returns the indices of attachable interfaces by name. without explains the reason for
// another interface.
func (s *instance) devices() (out map[string]int, without func(name string) string, err error) {
	all, err := s.interfaces()
	if err != nil {
		return nil, nil, err
	}
	out = map[string]int{}
	for name, a := range all {
		if ethernet, known := headers[a.EncapType]; known && ethernet != s.pub.Raw {
			out[name] = a.Index
		}
	}
	return out, func(name string) string {
		a, ok := all[name]
		if !ok {
			return fmt.Sprintf("there is no interface %s: weir serve, or weir apply, attaches the filter once it appears", name)
		}
		if _, known := headers[a.EncapType]; !known {
			return fmt.Sprintf("interface %s has type %s, unsupported by weir", name, a.EncapType)
		}
		return fmt.Sprintf("interface %s differs from the filter's others, some with and some without an Ethernet header: give it its own filter", name)
	}, nil
}

// raw reports whether the first existing interface has no link header.
func (s *instance) raw() (bool, error) {
	all, err := s.interfaces()
	for _, name := range s.pub.Filter.Interfaces {
		if a, ok := all[name]; ok {
			ethernet, known := headers[a.EncapType]
			return known && !ethernet, err
		}
	}
	return false, err
}

// view returns the program's view of a packet.
func (p *published) view() view {
	if v := p.Filter.Hook.view(); v != viewTC || !p.Raw {
		return v
	}
	return viewTCRaw
}

// program loads the published program again, with its pinned maps.
func (s *instance) program() (*kernel.Collection, error) {
	c, _, err := s.pub.compileAndLoad(func() map[string]*ebpf.Map { return sharedMaps(s.pins.Maps) })
	return c, err
}

// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// published is a filter as its pins describe it: the truth that attachments follow.
type published struct {
	Filter Filter            `json:"filter"` // defaults filled in
	Netns  string            `json:"netns"`  // as people know the namespace
	Holder holderName        `json:"holder"` // what its program is held by
	Lists  map[string]string `json:"lists,omitempty"`
	Before []string          `json:"before,omitempty"` // keys of the rules that map_before counts, by index
	// Was is the form before, where it was held otherwise by something that has no link:
	// a killed command may have left that in place.
	Was *published `json:"was,omitempty"`

	meta kernel.Meta
}

func scopeOf(ns *netns.Handle) string { return strconv.FormatUint(ns.Inode(), 10) }

func instanceOf(scope, name string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: Name, Name: name}
}

// parse reads what is published.
func parse(i kernel.Instance, m kernel.Meta) (*published, error) {
	if m.ABI > ABI {
		return nil, fmt.Errorf("%w: filter %s has ABI %d, made by weir %s, and this weir knows %d at most: use that weir; nothing was changed",
			kernel.ErrABI, i.Name, m.ABI, m.Version, ABI)
	}
	p := &published{meta: m}
	if err := json.Unmarshal(m.Config, p); err != nil {
		return nil, fmt.Errorf("the pins of filter %s: %w", i.Name, err)
	}
	p.Filter = p.Filter.withDefaults()
	return p, nil
}

// site is a filter in its namespace.
type site struct {
	lock *kernel.WriteLock // nil for readers
	inst kernel.Instance
	pub  *published
	pins *kernel.Opened // nil before it is published
	ns   *netns.Handle
}

// openSite opens a published filter for writing.
func openSite(l *kernel.WriteLock, i kernel.Instance) (*site, error) {
	pins, err := l.Open(i)
	if err != nil {
		return nil, err
	}
	s := &site{lock: l, inst: i, pins: pins}
	if s.pub, err = parse(i, pins.Meta); err == nil {
		s.ns, err = findNetns(s.pub)
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// findNetns opens the namespace of a published filter. One whose number has come
// back for another is gone.
func findNetns(p *published) (*netns.Handle, error) {
	ns, err := netns.Find(p.Netns, p.meta.Inode)
	if err != nil {
		return nil, err
	}
	if cookie, err := ns.Cookie(); err == nil && p.meta.Cookie != 0 && cookie != p.meta.Cookie {
		ns.Close()
		return nil, fmt.Errorf("%w: net:[%d] is another one now", netns.ErrGone, p.meta.Inode)
	}
	return ns, nil
}

// Close closes what is open; everything stays pinned.
func (s *site) Close() {
	if s.pins != nil {
		s.pins.Close()
	}
	if s.ns != nil {
		s.ns.Close()
	}
}

// reopen opens the pins anew after they have been published.
func (s *site) reopen() error {
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

// current says whether a program is that of the published form: only it uses the
// form's map of counts.
func (s *site) current(program uint32) (bool, error) {
	id, err := s.countsID()
	if err != nil {
		return false, err
	}
	return kernel.ProgramUses(program, id)
}

func (s *site) countsID() (ebpf.MapID, error) {
	info, err := s.pins.Maps["counts"].Info()
	if err != nil {
		return 0, err
	}
	id, ok := info.ID()
	if !ok {
		return 0, errors.New("the kernel gives maps no numbers")
	}
	return id, nil
}

// devices are the interfaces of the filter that are there, by name.
func (s *site) devices() (map[string]int, error) {
	var links []netlink.Link
	err := s.ns.Do(func() (err error) { links, err = netlink.LinkList(); return err })
	if err != nil {
		return nil, fmt.Errorf("listing the interfaces of %s: %w", s.ns, err)
	}
	all := map[string]int{}
	for _, l := range links {
		all[l.Attrs().Name] = l.Attrs().Index
	}
	out := map[string]int{}
	for _, name := range s.pub.Filter.Interfaces {
		if index, ok := all[name]; ok {
			out[name] = index
		}
	}
	return out, nil
}

// program loads the published program once more, with its pinned maps.
func (s *site) program() (*kernel.Collection, error) {
	c, _, err := s.pub.Filter.load(sharedMaps(s.pins.Maps))
	return c, err
}

// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// form is a filter that is loaded and not published yet.
type form struct {
	pub  *published
	coll *kernel.Collection
	hash [sha256.Size]byte
	maps map[string]*ebpf.Map // by pin
	made []*ebpf.Map          // of them those that are closed with the form
}

// Close closes the program and the maps; what is attached and pinned stays.
func (f *form) Close() {
	f.coll.Close()
	for _, m := range f.made {
		m.Close()
	}
}

func (f *form) program() *ebpf.Program { return f.coll.Programs[programName] }

// load makes a form of what is to be published. from is the form before, or nil.
func (p *published) load(from *instance) (*form, error) {
	share := noMaps
	if from != nil {
		keepRoom(p.Lists, from.pub.Lists)
		share = func() map[string]*ebpf.Map { return inheritLists(p.Lists, from.pub.Lists, from.pins.Maps) }
	}
	coll, hash, err := p.compileAndLoad(share)
	if err != nil {
		return nil, err
	}
	f := &form{pub: p, coll: coll, hash: hash, maps: pinnedMaps(coll)}
	if f.maps["counts"] == nil {
		err = fmt.Errorf("filter %s: its program has no map %s", p.Filter.Name, countsMap)
	}
	own := func(name string, m *ebpf.Map, e error) {
		if err = errors.Join(err, e); e == nil {
			f.maps[name] = m
			f.made = append(f.made, m)
		}
	}
	m, e := baseMap(len(p.Filter.countKeys()))
	own("base", m, e)
	if p.Attacher == attacherNetfilter && (from == nil || !sameAttachment(from.pub, p)) {
		m, e = kernel.NewDispatcherSlot("filter_slot")
		own(slotMap, m, e)
	}
	if p.Attacher == attacherClsact && (from == nil || from.pins.Maps[devicesMap] == nil) {
		m, e = newDevicesMap()
		own(devicesMap, m, e)
	}
	if err == nil && from != nil {
		err = f.inherit(from)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// inherit takes over from the form before what goes on: its counts, and the maps
// by which its attachments are known.
func (f *form) inherit(from *instance) error {
	if from.pins.Maps["before"] != nil {
		// Its counts are added up for good, and a packet may still be in the program that
		// the change before this one replaced.
		kernel.WaitForPrograms()
	}
	sums, err := carried(from.pins, from.pub)
	if err != nil {
		return err
	}
	for i, key := range f.pub.Filter.countKeys() {
		if err := f.maps["base"].Put(uint32(i), sums[key]); err != nil {
			return fmt.Errorf("carrying counts on: %w", err)
		}
	}
	f.pub.Before = from.pub.Filter.countKeys()
	f.maps["before"] = from.pins.Maps["counts"]
	for _, name := range []string{slotMap, devicesMap} {
		if m := from.pins.Maps[name]; m != nil && f.maps[name] == nil && (name != slotMap || f.pub.Attacher == attacherNetfilter) {
			f.maps[name] = m
		}
	}
	if sameAttachment(from.pub, f.pub) || from.pub.Attacher == attacherNFT && f.pub.Attacher == attacherNFT {
		return nil // nothing is left behind: the table of nftables is the same one
	}
	if from.pub.Attacher == attacherNFT || from.pub.Attacher == attacherClsact {
		was := *from.pub
		was.Was, was.Before = nil, nil
		f.pub.Was = &was
	}
	return nil
}

// published is the form as the store takes it.
func (f *form) published(ns *netns.Handle, links map[string]kernel.Link) instances.Form[published] {
	return instances.Form[published]{Spec: *f.pub, Netns: ns, Object: f.hash, Pins: kernel.Pins{Maps: f.maps, Links: links}}
}

// create publishes a filter where none of its name is. Links are attached first:
// where one cannot be, nothing of the filter stays.
func create(l *kernel.WriteLock, p *published, ns *netns.Handle) error {
	f, err := p.load(nil)
	if err != nil {
		return err
	}
	defer f.Close()
	s := &instance{lock: l, inst: filters.Name(kernel.ScopeOf(ns), p.Filter.Name), pub: p, ns: ns}
	h := p.Attacher.attacher()
	links, err := h.attach(s, f.maps, f.program())
	defer closeLinks(links)
	if err != nil {
		return fmt.Errorf("filter %s: %w", p.Filter.Name, err)
	}
	if err := filters.Publish(l, s.inst, f.published(ns, links)); err != nil {
		return err
	}
	kernel.Step("filter:published")
	if err = s.reopen(); err == nil {
		defer s.pins.Close()
		err = h.reconcile(s, f.program())
	}
	if err != nil {
		return errors.Join(fmt.Errorf("filter %s: %w", p.Filter.Name, err), h.clear(s, p), filters.Remove(l, s.inst))
	}
	kernel.Step("filter:created")
	return nil
}

func closeLinks(links map[string]kernel.Link) {
	for _, ln := range links {
		ln.Close()
	}
}

// change replaces a published filter: each packet meets the form before or the new
// one. Where the location changes, or moves says that the filter moves at its hook, both are there for
// an instant, and a packet may be dropped by either.
func (s *instance) change(p *published, moves bool) error {
	f, err := p.load(s)
	if err != nil {
		return err
	}
	defer f.Close()
	old := s.pub
	h := p.Attacher.attacher()
	var keep []string
	var links, former map[string]kernel.Link
	s.pub = p
	stays := sameAttachment(old, p) && !moves
	if stays {
		if keep, err = s.pins.Links(); err != nil {
			return err
		}
	} else {
		links, err = h.attach(s, f.maps, f.program())
		defer closeLinks(links)
		if err != nil {
			return fmt.Errorf("filter %s: %w", p.Filter.Name, err)
		}
		former = s.links()
		defer closeLinks(former)
	}
	swap := func() error { return h.enter(s, f.maps, f.program()) }
	if stays {
		swap = func() error { return h.move(s, f.maps, f.program()) }
	}
	if err := filters.Exchange(s.lock, s.inst, f.published(s.ns, links), keep, swap); err != nil {
		return err
	}
	for _, ln := range former {
		_ = ln.Detach() // the kernel lets go of links without pins in its own time
	}
	kernel.Step("filter:changed")
	if err := s.reopen(); err != nil {
		return err
	}
	return s.reconcile(f.program())
}

// links opens the links of the published form, as far as they open.
func (s *instance) links() map[string]kernel.Link {
	out := map[string]kernel.Link{}
	names, _ := s.pins.Links()
	for _, name := range names {
		if ln, err := s.pins.Link(name); err == nil {
			out[name] = ln
		}
	}
	return out
}

// misplaced says whether the filter is attached where its order does not ask for it.
func (s *instance) misplaced() (bool, error) {
	attachments, err := s.pub.Attacher.attacher().attachments(s)
	return slices.ContainsFunc(attachments, func(p Attachment) bool { return p.misplaced }), err
}

// reconcile makes the attachments those that the pins say.
func (s *instance) reconcile(prog *ebpf.Program) error {
	if err := s.pub.Attacher.attacher().reconcile(s, prog); err != nil {
		return fmt.Errorf("filter %s: %w", s.pub.Filter.Name, err)
	}
	kernel.Step("filter:settled")
	return s.clearWas()
}

// clearWas takes away what the form before had and no link ends.
func (s *instance) clearWas() error {
	w := s.pub.Was
	if w == nil {
		return nil
	}
	if w.Attacher == attacherClsact && s.pub.Attacher != attacherClsact {
		s.lock.NoteFilters(s.inst, nil) // else they would be missed
	}
	if err := w.Attacher.attacher().clear(s, w); err != nil {
		return fmt.Errorf("filter %s: what it was before: %w", s.pub.Filter.Name, err)
	}
	kernel.Step("filter:cleared")
	return nil
}

// remove takes a filter away: what has no link first, by what is pinned.
func remove(l *kernel.WriteLock, i kernel.Instance) error {
	s, err := openInstance(l, i)
	if errors.Is(err, netns.ErrGone) {
		return filters.Remove(l, i) // with the namespace its attachments went
	} else if err != nil {
		return err
	}
	defer s.Close()
	if err := errors.Join(s.clearWas(), s.pub.Attacher.attacher().clear(s, s.pub)); err != nil {
		return fmt.Errorf("filter %s: %w", i.Name, err)
	}
	kernel.Step("filter:detached")
	return filters.Remove(l, i)
}

// recover finishes a change that was killed: attachments that run the form before go over
// to the published one. What is missing altogether, weir apply attaches: somebody
// may have taken it away on purpose.
func (s *instance) recover() error {
	attachments, err := s.pub.Attacher.attacher().attachments(s)
	if err != nil {
		return err
	}
	stale := false
	for _, p := range attachments {
		stale = stale || p.stale
	}
	if stale {
		if err := s.attachAll(); err != nil {
			return err
		}
	}
	return s.clearWas()
}

// attachAll makes every attachment run the published form.
func (s *instance) attachAll() error {
	c, err := s.program()
	if err != nil {
		return err
	}
	defer c.Close()
	h := s.pub.Attacher.attacher()
	if err := h.move(s, s.pins.Maps, c.Programs[programName]); err != nil {
		return err
	}
	return s.reconcile(c.Programs[programName])
}

// recoverAll finishes what a killed command left half done, in every namespace, and
// removes the filters of namespaces that are gone. The state tells of filters that cannot be read.
func recoverAll(l *kernel.WriteLock) error {
	all, _, err := filters.All(l.Root)
	if err != nil {
		return err
	}
	var errs []error
	for _, rec := range all {
		s, err := openInstance(l, rec.Instance)
		switch {
		case errors.Is(err, netns.ErrGone):
			err = filters.Remove(l, rec.Instance)
		case errors.Is(err, kernel.ErrDamaged):
			err = nil // a Checker tells, and apply recovers it
		case err == nil:
			err = s.recover()
			s.Close()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("recovering filter %s: %w", rec.Name, err))
		}
	}
	return errors.Join(errs...)
}

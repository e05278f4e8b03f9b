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

// form is a loaded filter before publication.
type form struct {
	pub  *published
	coll *kernel.Collection
	hash [sha256.Size]byte
	maps map[string]*ebpf.Map // by pin
	made []*ebpf.Map          // subset of maps closed with the form
}

// Close closes the program and the form's own maps. Attachments and pins stay.
func (f *form) Close() {
	f.coll.Close()
	for _, m := range f.made {
		m.Close()
	}
}

func (f *form) program() *ebpf.Program { return f.coll.Programs[programName] }

// load creates a form for publication. from is the previous form, or nil.
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
		err = fmt.Errorf("filter %s: program has no map %s", p.Filter.Name, countsMap)
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

// inherit takes over the previous form's counts, and the maps identifying its attachments.
func (f *form) inherit(from *instance) error {
	if from.pins.Maps["before"] != nil {
		// The sums of its counts become final here, and a packet may still be in the program
		// replaced by the change before this one.
		kernel.WaitForPrograms()
	}
	sums, err := carried(from.pins, from.pub)
	if err != nil {
		return err
	}
	for i, key := range f.pub.Filter.countKeys() {
		if err := f.maps["base"].Put(uint32(i), sums[key]); err != nil {
			return fmt.Errorf("carry over the counts of rules: %w", err)
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
		return nil // nothing is left behind: the nftables table is the same
	}
	if from.pub.Attacher == attacherNFT || from.pub.Attacher == attacherClsact {
		was := *from.pub
		was.Was, was.Before = nil, nil
		f.pub.Was = &was
	}
	return nil
}

// published returns the form for the store.
func (f *form) published(ns *netns.Handle, links map[string]kernel.Link) instances.Form[published] {
	return instances.Form[published]{Spec: *f.pub, Netns: ns, Object: f.hash, Pins: kernel.Pins{Maps: f.maps, Links: links}}
}

// create publishes a new filter. It attaches links first: if one fails, nothing remains.
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

// change replaces a published filter: each packet meets either the previous or the new form. Both
// are attached for a moment if the location changes, or if moves is set because the filter moves at
// its hook. Either may then drop a packet.
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
		_ = ln.Detach() // the kernel releases unpinned links asynchronously
	}
	kernel.Step("filter:changed")
	if err := s.reopen(); err != nil {
		return err
	}
	return s.reconcile(f.program())
}

// links opens the links of the published form and skips unreadable and foreign ones.
func (s *instance) links() map[string]kernel.Link {
	out := map[string]kernel.Link{}
	names, _ := s.pins.Links()
	for _, name := range names {
		ln, err := s.pins.Link(name)
		if err == nil && s.pins.RunsOwn(ln) {
			out[name] = ln
		} else if err == nil {
			ln.Close()
		}
	}
	return out
}

// misplaced reports whether an attachment violates the filter's order.
func (s *instance) misplaced() (bool, error) {
	attachments, err := s.pub.Attacher.attacher().attachments(s)
	return slices.ContainsFunc(attachments, func(p Attachment) bool { return p.misplaced }), err
}

// reconcile makes the attachments match the pins.
func (s *instance) reconcile(prog *ebpf.Program) error {
	if err := s.pub.Attacher.attacher().reconcile(s, prog); err != nil {
		return fmt.Errorf("filter %s: %w", s.pub.Filter.Name, err)
	}
	kernel.Step("filter:settled")
	return s.clearWas()
}

// clearWas removes attachments of the previous form not ended by a link.
func (s *instance) clearWas() error {
	w := s.pub.Was
	if w == nil {
		return nil
	}
	if w.Attacher == attacherClsact && s.pub.Attacher != attacherClsact {
		s.lock.NoteFilters(s.inst, nil) // otherwise a Checker reports them as missing
	}
	if err := w.Attacher.attacher().clear(s, w); err != nil {
		return fmt.Errorf("filter %s: remove its previous attachments: %w", s.pub.Filter.Name, err)
	}
	kernel.Step("filter:cleared")
	return nil
}

// remove removes a filter. It first removes attachments without links, using the pins.
func remove(l *kernel.WriteLock, i kernel.Instance) error {
	s, err := openInstance(l, i)
	if errors.Is(err, netns.ErrGone) {
		return filters.Remove(l, i) // its attachments ended with the namespace
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

// recover completes a killed change: attachments of the previous form switch to the published one.
// It does not attach missing ones, because someone may have detached them on purpose; weir apply
// does.
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

// recoverAll completes changes of killed commands in every namespace, and removes the filters of
// removed namespaces. The state reports unreadable filters.
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
			err = nil // a Checker reports it, and weir apply recovers it
		case err == nil:
			err = s.recover()
			s.Close()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("recover filter %s: %w", rec.Name, err))
		}
	}
	return errors.Join(errs...)
}

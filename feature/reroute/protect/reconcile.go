// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// instance is one namespace's protection, open for writing.
type instance struct {
	lock *kernel.WriteLock
	inst kernel.Instance
	ns   *netns.Handle
	pins *kernel.Opened
	scopeSpec
}

func (s *instance) close() {
	s.pins.Close()
	s.ns.Close()
}

// openInstance opens an instance and its namespace.
func openInstance(l *kernel.WriteLock, inst kernel.Instance) (_ *instance, err error) {
	s := &instance{lock: l, inst: inst}
	if s.scopeSpec, err = readSpec(l.Root, inst); err != nil {
		return nil, err
	}
	if s.ns, err = netns.Find(s.Netns, s.ID); err != nil {
		return nil, err
	}
	if s.pins, err = l.Open(inst); err != nil {
		s.ns.Close()
		return nil, err
	}
	return s, nil
}

// reconcile derives everything from the published configuration of a namespace. Every change takes effect through it,
// and it recovers killed commands. Without a path it removes everything. Its order keeps packets safe. Neighbours and
// the helper namespace precede the repairs. Repairs precede their references. Programs come last.
func reconcile(l *kernel.WriteLock, inst kernel.Instance) error { return reconcileSizes(l, inst, nil) }

// reconcileSizes is reconcile with the known sizes of ways. With nil, the installed sizes stay.
func reconcileSizes(l *kernel.WriteLock, inst kernel.Instance, sizes map[wayKey]uint32) error {
	s, err := openInstance(l, inst)
	if errors.Is(err, netns.ErrGone) {
		dropHelper(inst.Scope)
		return l.Remove(inst)
	} else if err != nil {
		return err
	}
	defer s.close()
	if len(s.Paths) == 0 {
		return s.remove()
	}
	var routes []route
	err = s.ns.Do(func() error {
		r, err := newResolver()
		if err == nil {
			routes = r.all(s.Paths)
		}
		return err
	})
	if err != nil {
		return err
	}
	if sizes == nil {
		if sizes, err = s.installedSizes(); err != nil {
			return err
		}
	}
	shrink(routes, sizes)
	if err := s.reconcileHelper(routes); err != nil {
		return fmt.Errorf("setting up the helper namespace for packets too big: %w", err)
	}
	kernel.Step("protect:helper")
	if err := s.ns.Do(func() error { return s.reconcileNeighbours(routes) }); err != nil {
		return err
	}
	kernel.Step("protect:neighbours")
	if err := s.install(routes); err != nil {
		return err
	}
	kernel.Step("protect:repairs")
	if err := s.attach(routes); err != nil {
		return err
	}
	kernel.Step("protect:programs")
	return s.ns.Do(func() error { return reconcileKept(routes) })
}

// remove removes everything. If it is killed, the published configuration is still empty and the next command
// continues.
func (s *instance) remove() error {
	if err := s.ns.Do(func() error { return reconcileKept(nil) }); err != nil {
		return err
	}
	kernel.Step("protect:kept")
	if err := s.attach(nil); err != nil {
		return err
	}
	kernel.Step("protect:detached")
	if err := s.ns.Do(func() error { return s.reconcileNeighbours(nil) }); err != nil {
		return err
	}
	if err := s.reconcileHelper(nil); err != nil {
		return err
	}
	kernel.Step("protect:cleared")
	if err := s.install(nil); err != nil {
		return err
	}
	return s.lock.Remove(s.inst)
}

// forget clears protection's bytes of a link state. Liveness may keep the map, and another link may get the slot.
func (s *instance) forget(slot uint32) error {
	w, err := links.MapWords(s.pins.Maps[pinLinks])
	if err != nil {
		return err
	}
	defer w.Close()
	w.Set(slot, links.CarrierByte, false)
	w.Set(slot, links.DrainByte, false)
	return nil
}

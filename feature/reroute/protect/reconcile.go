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

// reconcile makes everything follow the published configuration of a namespace. It is how every change takes effect, and how one
// that was killed is recovered; without a path it takes everything away. Its order keeps packets safe: neighbours and the helper
// namespace before repairs that need them, repairs before what leads to them, the programs last.
func reconcile(l *kernel.WriteLock, inst kernel.Instance) error { return reconcileSizes(l, inst, nil) }

// reconcileSizes is reconcile with the sizes that are known of ways; nil: those in force stay.
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
		return fmt.Errorf("the helper namespace for packets that are too big: %w", err)
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

// remove removes everything. Killed within, the configuration says still that there is no path, and the next command goes on.
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

// forget clears protection's bytes of a link's word: the map may go on as liveness's, and the slot be another's.
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

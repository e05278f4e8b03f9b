// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// A namespace in which something is bound has steer_dispatch in place of
// steer_lookup, and maps that only it needs: the bindings, and the services that
// they lead to, by number. The first bind has the engine go over to it, as an
// upgrade does, and so does a bind that finds its maps full, to larger ones.

// boundName is what BINDINGS_MAPS calls them.
const boundName = "bound"

// boundMaps are the pins of a table of bindings.
var boundMaps = []string{"bound_head", "bound_index", "bound_pages", "bound_sets", "bound_many"}

// fewestBindings is the room that the first bind makes; each larger one is four
// times the one before, up to table.MostBindings.
const fewestBindings = 1 << 12

// roomFor is the least room that takes n bindings.
func roomFor(n int) int {
	room := fewestBindings
	for room < n {
		room *= 4
	}
	return room
}

// roomOf is for how many bindings an engine's maps were made; 0: for none.
func roomOf(maps map[string]*ebpf.Map) int {
	if m := maps["bound_many"]; m != nil {
		return int(m.MaxEntries())
	}
	return 0
}

// mapName is what the object calls the map of a pin.
func mapName(pin string) string {
	if slices.Contains(boundMaps, pin) {
		return pin
	}
	return "steer_" + pin
}

// unshareBindings keeps a table's maps together: some of one and some of another
// are no table.
func unshareBindings(share map[string]*ebpf.Map) {
	whole := true
	for _, name := range boundMaps {
		whole = whole && share[name] != nil
	}
	for _, name := range boundMaps {
		if !whole {
			delete(share, name)
		}
	}
}

// copyBindings fills a table that is new with what the old one says. Nobody else
// writes meanwhile: whoever may holds the lock.
func (e *engine) copyBindings(old *kernel.Opened) error {
	if !e.renewed(old, "bound_sets") {
		return nil
	}
	from, err := openBound(old.Maps, false)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := openBound(e.pins.Maps, true)
	if err != nil {
		return err
	}
	defer to.Close()
	all := make([]table.Binding, 0, from.Len())
	for x, err := range from.All() {
		if err != nil {
			return err
		}
		all = append(all, x)
	}
	if err := to.Replace(all); err != nil {
		return fmt.Errorf("copying %d bindings: %w", len(all), err)
	}
	return nil
}

// renewed says whether a map of this engine is another than the old engine's.
func (e *engine) renewed(old *kernel.Opened, name string) bool {
	a, b := e.pins.Maps[name], old.Maps[name]
	if a == nil || b == nil {
		return false
	}
	x, err := a.Info()
	y, err2 := b.Info()
	if err != nil || err2 != nil {
		return true
	}
	i, _ := x.ID()
	j, _ := y.ID()
	return i != j
}

func openBound(maps map[string]*ebpf.Map, write bool) (*table.Bindings, error) {
	m, err := table.BindingsOf(maps, boundName)
	if err != nil {
		return nil, err
	}
	if write {
		return table.OpenBindings(m)
	}
	return table.OpenBindingsReader(m)
}

// dispatch is a namespace's bindings and the services that they lead to, open for
// writing.
type dispatch struct {
	*engine
	ns     *netns.Handle
	bound  *table.Bindings
	labels *labels
}

// openDispatch opens the dispatch of a namespace, with room for so many bindings.
// It makes the engine, or has it go over, where that is not there yet.
func openDispatch(l *kernel.WriteLock, ns *netns.Handle, room int) (*dispatch, error) {
	if room > table.MostBindings {
		return nil, fmt.Errorf("%w: there may be %d in a namespace at most", table.ErrFull, table.MostBindings)
	}
	if err := CleanStale(l); err != nil {
		return nil, err
	}
	scope := scopeOf(ns)
	e, err := openEngine(l, scope, EngineSkLookup)
	switch {
	case errors.Is(err, kernel.ErrNotExist):
		err = publishEngine(l, ns, EngineSkLookup, room)
	case err == nil && roomOf(e.pins.Maps) < room:
		e.Close()
		err = rebuildEngine(l, scope, EngineSkLookup, room)
	case err == nil:
		return newDispatch(e, ns)
	}
	if err != nil {
		return nil, err
	}
	kernel.Step("steer:room made")
	if e, err = openEngine(l, scope, EngineSkLookup); err != nil {
		return nil, err
	}
	return newDispatch(e, ns)
}

// openDispatchThere opens what there is. It returns ErrNotExist where nothing was
// ever bound.
func openDispatchThere(l *kernel.WriteLock, ns *netns.Handle) (*dispatch, error) {
	if err := CleanStale(l); err != nil {
		return nil, err
	}
	e, err := openEngine(l, scopeOf(ns), EngineSkLookup)
	if err != nil {
		return nil, err
	}
	if roomOf(e.pins.Maps) == 0 {
		e.Close()
		return nil, fmt.Errorf("namespace %s: %w", ns, kernel.ErrNotExist)
	}
	return newDispatch(e, ns)
}

func newDispatch(e *engine, ns *netns.Handle) (_ *dispatch, err error) {
	d := &dispatch{engine: e, ns: ns, labels: &labels{maps: e.pins.Maps}}
	if d.bound, err = openBound(e.pins.Maps, true); err == nil {
		err = d.mend()
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// Close closes the maps; everything stays pinned.
func (d *dispatch) Close() {
	if d.bound != nil {
		d.bound.Close()
	}
	d.engine.Close()
}

// change runs what changes bindings and counts of services. Killed in it, the next
// one to open the dispatch counts anew.
func (d *dispatch) change(f func() error) error {
	if err := d.labels.mark(true); err != nil {
		return err
	}
	if err := f(); err != nil {
		return errors.Join(err, d.recount())
	}
	return d.labels.mark(false)
}

// mend corrects the counts that a killed command left.
func (d *dispatch) mend() error {
	marked, err := d.labels.marked()
	if err != nil || !marked {
		return err
	}
	return d.recount()
}

// recount counts bindings by what is bound.
func (d *dispatch) recount() error {
	counts := map[uint32]uint32{}
	for x, err := range d.bound.All() {
		if err != nil {
			return err
		}
		counts[x.Value-1]++
	}
	if err := d.count(counts); err != nil {
		return err
	}
	return d.labels.mark(false)
}

// dispatches says whether something is bound or registered in an engine's
// namespace, so that it must stay.
func (e *engine) dispatches() (bool, error) {
	if roomOf(e.pins.Maps) == 0 {
		return false, nil
	}
	all, err := (&labels{maps: e.pins.Maps}).all()
	if err != nil {
		return false, err
	}
	for _, x := range all {
		if x.Bindings > 0 || e.hasSocket(x.ID) {
			return true, nil
		}
	}
	return false, nil
}

// leave removes the engine if nothing needs it any more.
func (d *dispatch) leave() error {
	if len(d.services) > 0 || d.bound.Len() > 0 {
		return nil
	}
	used, err := d.dispatches()
	if err != nil || used {
		return err
	}
	if err := removeTemplates(d.lock, d.scope); err != nil {
		return err
	}
	return d.lock.Remove(engineInstance(d.scope, d.kind))
}

// given is the cookie of a registered socket, 0 where there is none.
func (e *engine) given(id, kind uint32) (cookie uint64) {
	if e.pins.Maps["given"].Lookup(id*kinds4+kind, &cookie) != nil {
		return 0
	}
	return cookie
}

// kinds4 is STEER_KINDS: UDP and TCP over IPv4, UDP and TCP over IPv6.
const kinds4 = 4

// kindOfPacket numbers a packet's protocol and family as the program does.
func kindOfPacket(tcp, v6 bool) (kind uint32) {
	if tcp {
		kind |= 1
	}
	if v6 {
		kind |= 2
	}
	return kind
}

func kindName(kind uint32) string {
	return [kinds4]string{"udp4", "tcp4", "udp6", "tcp6"}[kind]
}

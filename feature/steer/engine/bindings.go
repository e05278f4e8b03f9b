// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// A namespace with bindings uses steer_dispatch in place of steer_lookup, and additional maps: the bindings, and the
// services by number. The first bind moves the engine to them, like an upgrade. A bind with full maps moves the engine
// to larger ones.

// boundName is the map prefix of the macro BINDINGS_MAPS.
const boundName = "bound"

// boundMaps are the pins of a table of bindings.
var boundMaps = []string{"bound_head", "bound_index", "bound_pages", "bound_sets", "bound_many"}

// FewestBindings is the capacity created by the first bind. Each larger size is four times the previous one, up to
// table.MaxBindings.
const FewestBindings = 1 << 12

// Room returns the capacity for bindings of an engine's maps. 0 means no bindings.
func Room(maps map[string]*ebpf.Map) int {
	if m := maps["bound_many"]; m != nil {
		return int(m.MaxEntries())
	}
	return 0
}

// mapName returns the object's map name of a pin.
func mapName(pin string) string {
	if slices.Contains(boundMaps, pin) {
		return pin
	}
	return "steer_" + pin
}

// unshareBindings removes all maps of the table if one is missing. A mix of old and new maps is not a valid table.
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

// copyBindings fills a new table from the old one. Writers hold the lock, so the table cannot change meanwhile.
func (e *Engine) copyBindings(old *kernel.Opened) error {
	if !e.renewed(old, "bound_sets") {
		return nil
	}
	from, err := OpenBound(old.Maps, false)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := OpenBound(e.Pins.Maps, true)
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
		return fmt.Errorf("copy %d bindings: %w", len(all), err)
	}
	return nil
}

// renewed reports whether a map differs from the old engine's map.
func (e *Engine) renewed(old *kernel.Opened, name string) bool {
	a, b := e.Pins.Maps[name], old.Maps[name]
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

// OpenBound opens the table of bindings in an engine's maps.
func OpenBound(maps map[string]*ebpf.Map, write bool) (*table.Bindings, error) {
	m, err := table.FindBindings(maps, boundName)
	if err != nil {
		return nil, err
	}
	if write {
		return table.OpenBindings(m)
	}
	return table.OpenBindingsReader(m)
}

// Dispatches reports whether the engine has a binding or a registered socket. Such an engine must not be removed.
func (e *Engine) Dispatches() (bool, error) {
	if Room(e.Pins.Maps) == 0 {
		return false, nil
	}
	all, err := (&Labels{Maps: e.Pins.Maps}).All()
	if err != nil {
		return false, err
	}
	for _, x := range all {
		if x.Bindings > 0 || e.HasSocket(x.ID) {
			return true, nil
		}
	}
	return false, nil
}

// Given returns the cookie of a registered socket, or 0.
func (e *Engine) Given(id, kind uint32) (cookie uint64) {
	if e.Pins.Maps["given"].Lookup(id*KindsIPv4+kind, &cookie) != nil {
		return 0
	}
	return cookie
}

// KindsIPv4 is STEER_KINDS: UDP and TCP over IPv4, UDP and TCP over IPv6.
const KindsIPv4 = 4

// KindOfPacket numbers a packet's protocol and family like the program.
func KindOfPacket(tcp, v6 bool) (kind uint32) {
	if tcp {
		kind |= 1
	}
	if v6 {
		kind |= 2
	}
	return kind
}

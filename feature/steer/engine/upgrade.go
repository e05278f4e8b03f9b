// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// ShortHash returns the first 6 bytes of a hash in hexadecimal.
func ShortHash(h [sha256.Size]byte) string { return fmt.Sprintf("%x", h[:6]) }

// UpgradeEngine upgrades only the engine. The mark makes the next opening reconcile the services' directories.
func UpgradeEngine(l *kernel.WriteLock, scope string, kind spec.Engine) error {
	return RebuildEngine(l, scope, kind, 0)
}

// RebuildEngine moves an engine to this version's program, with capacity for at least room bindings.
func RebuildEngine(l *kernel.WriteLock, scope string, kind spec.Engine, room int) error {
	old, err := l.Open(record.EngineInstance(scope, kind))
	if err != nil {
		return err
	}
	defer old.Close()
	room = max(room, Room(old.Maps))
	if err := old.Meta.RequireABI(old.Instance, record.ABI); err != nil {
		return err
	}
	e := &Engine{Lock: l, Scope: scope, Kind: kind, Pins: old}
	if err := e.readServices(); err != nil {
		return err
	}
	share, err := unchanged(old, kind, room)
	if err == nil {
		err = e.keepsMaps(share)
	}
	if err != nil {
		return err
	}
	c, err := loadPrograms(kind, room, share)
	if err != nil {
		return err
	}
	defer c.Close()
	if old.Maps["exits"] != nil && c.Programs[bpf.SteerProgSteerExit] == nil {
		// Without it, the slots of members would stay admitted if their children keep the sockets open.
		return fmt.Errorf("%s needs a missing facility: %w", old.Instance, probe.ExitTracepoint.Check())
	}
	e.Pins = &kernel.Opened{Instance: old.Instance, Meta: old.Meta, Maps: pinnedMaps(c)}
	own, err := e.carryOwn(old)
	defer func() {
		for _, m := range own {
			m.Close()
		}
	}()
	if err != nil {
		return err
	}
	links, err := e.migrate(old, c)
	for _, ln := range links {
		defer ln.Close()
	}
	if err != nil {
		return fmt.Errorf("namespace %s: %w", scope, err)
	}
	if err := e.goOver(c, links); err != nil {
		return err
	}
	kernel.Step("steer:upgraded")
	return nil
}

// goOver switches to the new program.
func (e *Engine) goOver(c *kernel.Collection, links map[string]kernel.Link) error {
	u := kernel.Upgrade{Meta: e.Pins.Meta, Pins: kernel.Pins{Maps: e.Pins.Maps, Links: links}}
	u.Meta.Object, u.Meta.Version, u.Meta.Created = ObjectHash(e.Kind), kernel.Version, time.Now()
	if e.Kind == spec.EngineSkLookup {
		u.Link, u.Program = "lookup", lookupProgram(c)
		return e.Lock.Upgrade(e.Pins.Instance, u)
	}
	// Groups change one by one. After a kill, the mark makes the next command change the remaining groups.
	u.Swap = e.renewGroups
	marked, err := e.marked()
	if err == nil {
		err = e.Mark(true)
	}
	if err == nil {
		err = e.Lock.Upgrade(e.Pins.Instance, u)
	}
	if err == nil && !marked {
		err = e.Mark(false)
	}
	return err
}

// unchanged returns the maps of an engine that this version's program can share, by map name.
func unchanged(old *kernel.Opened, kind spec.Engine, room int) (map[string]*ebpf.Map, error) {
	spec, err := loadSpec(kind, room)
	if err != nil {
		return nil, err
	}
	share := map[string]*ebpf.Map{}
	for name, m := range old.Maps {
		name = mapName(name)
		if s := spec.Maps[name]; s != nil && s.Compatible(m) == nil {
			share[name] = m
		}
	}
	unshareBindings(share)
	if share[bpf.SteerMapSteerSlots] == nil {
		// Recovery created new slots, and the lost engine's program may still run for a while. With a shared exits map
		// it would take entries from the new program.
		delete(share, bpf.SteerMapSteerExits)
	}
	return share, nil
}

// keepsMaps rejects new maps if unreadable services have entries in the old ones. Those entries could not be copied.
func (e *Engine) keepsMaps(share map[string]*ebpf.Map) error {
	if len(e.Kept.Names) == 0 {
		return nil
	}
	for name := range e.Pins.Maps {
		own := slices.ContainsFunc(ownMaps(e.Kind, FewestBindings), func(s *ebpf.MapSpec) bool { return s.Name == mapName(name) })
		if share[mapName(name)] == nil && !own && !slices.Contains(boundMaps, name) {
			return fmt.Errorf("namespace %s: a new map %s would lose the entries of unreadable services (%s)", e.Scope, name, strings.Join(e.Kept.Names, ", "))
		}
	}
	return nil
}

// carryOwn takes over the maps used by user space only, and creates the missing ones. If the engine changes to
// steer_dispatch, it sets the mark: Reconcile then adds prefix lengths to the ports. The caller closes the returned
// maps, also after an error.
func (e *Engine) carryOwn(old *kernel.Opened) (made []*ebpf.Map, err error) {
	for _, spec := range ownMaps(e.Kind, Room(e.Pins.Maps)) {
		name := strings.TrimPrefix(spec.Name, "steer_")
		if was := old.Maps[name]; was != nil {
			e.Pins.Maps[name] = was
			continue
		}
		m, err := ebpf.NewMap(spec)
		if err != nil {
			return made, fmt.Errorf("create map %s: %w", spec.Name, err)
		}
		made = append(made, m)
		e.Pins.Maps[name] = m
	}
	if Room(old.Maps) == 0 && Room(e.Pins.Maps) > 0 {
		err = e.Mark(true)
	}
	return made, err
}

// migrate attaches the exit program, then fills the new maps from the old ones. The caller closes the links, also after an
// error.
func (e *Engine) migrate(old *kernel.Opened, c *kernel.Collection) (links map[string]kernel.Link, err error) {
	links = map[string]kernel.Link{}
	if p := c.Programs[bpf.SteerProgSteerExit]; p != nil {
		if links["exit"], err = exitTracepoint.Attach(p); err != nil {
			delete(links, "exit")
			return links, err
		}
	}
	kernel.Step("steer:exit attached")
	if old.Maps["listens"] == nil { // the following Reconcile writes the exact value
		if err := e.listens(true); err != nil {
			return links, err
		}
	}
	if err := e.copyBindings(old); err != nil {
		return links, err
	}
	kernel.Step("steer:bindings copied")
	return links, nil
}

// finishUpgrade completes a killed upgrade of a marked engine. It runs before Reconcile starts to use the services'
// maps.
func (e *Engine) finishUpgrade() error {
	if e.Kind == spec.EngineReuseport && e.Pins.Meta.Object == ObjectHash(e.Kind) {
		return e.renewGroups() // otherwise the groups still run the pinned version, or another upgrade follows
	}
	return nil
}

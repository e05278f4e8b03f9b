// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Upgrader = Feature{}

// Outdated is an engine whose program another weir put in place.
type Outdated struct {
	Netns   string `json:"netns"` // as the kernel names it: net:[4026531840]
	Engine  Engine `json:"engine"`
	Object  string `json:"object"`  // the beginning of the SHA-256 of the BPF object
	Version string `json:"version"` // of the weir that put it there
	scope   string
}

// String is the change that an upgrade makes.
func (o Outdated) String() string {
	s := fmt.Sprintf("object %s → %s", o.Object, shortHash(hashOf(o.Engine)))
	if o.Version != Version {
		s += fmt.Sprintf(", weir %s → %s", o.Version, Version)
	}
	return s
}

func shortHash(h [sha256.Size]byte) string { return fmt.Sprintf("%x", h[:6]) }

// outdated lists the engines among instances that an upgrade would change.
func outdated(r *kernel.Root, all []kernel.Instance) ([]Outdated, error) {
	var out []Outdated
	for _, i := range all {
		kind, ok := kindOf(i)
		if !ok {
			continue
		}
		m, err := r.Meta(i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, err
		}
		if err := m.RequireABI(i, ABI); err != nil {
			return nil, err
		}
		if m.Object != hashOf(kind) {
			out = append(out, Outdated{Netns: fmt.Sprintf("net:[%s]", i.Scope), Engine: kind,
				Object: shortHash(m.Object), Version: m.Version, scope: i.Scope})
		}
	}
	return out, nil
}

// PlanUpgrade implements feature.Upgrader.
func (Feature) PlanUpgrade(_ context.Context, r *kernel.Root) (feature.Plan, error) {
	var plan feature.Plan
	all, err := r.Instances(Name)
	if err != nil {
		return plan, err
	}
	list, err := outdated(r, all)
	for _, o := range list {
		plan.Add(upgradeStep(o))
	}
	return plan, err
}

func upgradeStep(o Outdated) feature.Step {
	return feature.Step{Verb: "upgrade", Object: fmt.Sprintf("engine %s of %s", o.Engine, o.Netns), Detail: o.String(),
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgrade(l, o.scope, o.Engine) }}
}

// upgrade puts this weir's program in place of another's, and brings the maps
// into this weir's layout. Every packet meets one of the two programs, with maps
// that say the same. Killed at any step, the next command finishes.
func upgrade(l *kernel.WriteLock, scope string, kind Engine) error {
	if err := upgradeEngine(l, scope, kind); err != nil {
		return err
	}
	e, err := openEngine(l, scope, kind) // which finishes it
	if err != nil {
		return err
	}
	e.Close()
	return nil
}

// upgradeEngine moves the engine alone: the services' directories follow when it
// is opened next, for the mark says that they differ.
func upgradeEngine(l *kernel.WriteLock, scope string, kind Engine) error {
	return rebuildEngine(l, scope, kind, 0)
}

// rebuildEngine moves an engine to this weir's program, with room for so many
// bindings at least.
func rebuildEngine(l *kernel.WriteLock, scope string, kind Engine, room int) error {
	old, err := l.Open(engineInstance(scope, kind))
	if err != nil {
		return err
	}
	defer old.Close()
	room = max(room, roomOf(old.Maps))
	if err := old.Meta.RequireABI(old.Instance, ABI); err != nil {
		return err
	}
	e := &engine{lock: l, scope: scope, kind: kind}
	if e.services, err = readServices(l.Root, scope, kind); err != nil {
		return err
	}
	share, err := unchanged(old, kind, room)
	if err != nil {
		return err
	}
	c, err := loadPrograms(kind, room, share)
	if err != nil {
		return err
	}
	defer c.Close()
	if old.Maps["exits"] != nil && c.Programs[bpf.SteerProgSteerExit] == nil {
		// Without it the slots of members whose children hold their sockets would not be withdrawn.
		return fmt.Errorf("%s uses what is missing here: %w", old.Instance, kernel.ExitTracepoint.Check())
	}
	e.pins = &kernel.Opened{Instance: old.Instance, Meta: old.Meta, Maps: pinnedMaps(c)}
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

// goOver is the moment of the change.
func (e *engine) goOver(c *kernel.Collection, links map[string]kernel.Link) error {
	u := kernel.Upgrade{Meta: e.pins.Meta, Pins: kernel.Pins{Maps: e.pins.Maps, Links: links}}
	u.Meta.Object, u.Meta.Version, u.Meta.Created = hashOf(e.kind), Version, time.Now()
	if e.kind == EngineSkLookup {
		u.Link, u.Program = "lookup", lookupProgram(c)
		return e.lock.Upgrade(e.pins.Instance, u)
	}
	// Groups go over one by one: the mark has whoever finds some of them left see to it.
	u.Swap = e.renewGroups
	marked, err := e.marked()
	if err == nil {
		err = e.mark(true)
	}
	if err == nil {
		err = e.lock.Upgrade(e.pins.Instance, u)
	}
	if err == nil && !marked {
		err = e.mark(false)
	}
	return err
}

// unchanged are the maps of an engine that this weir's program takes as they are,
// by the names that the program has for them.
func unchanged(old *kernel.Opened, kind Engine, room int) (map[string]*ebpf.Map, error) {
	spec, err := specOf(kind, room)
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
		// Recovery made slots anew, and the lost engine's program may still run for a while:
		// with one list it would take the entry of an exit away from the new program.
		delete(share, bpf.SteerMapSteerExits)
	}
	return share, nil
}

// carryOwn takes over the maps only user space knows, and makes the missing ones. It sets
// the mark where the engine changes to steer_dispatch: sync then writes to its ports how
// long their prefixes are. The caller closes the returned maps, also after an error.
func (e *engine) carryOwn(old *kernel.Opened) (made []*ebpf.Map, err error) {
	for _, spec := range ownMaps(e.kind, roomOf(e.pins.Maps)) {
		name := strings.TrimPrefix(spec.Name, "steer_")
		if was := old.Maps[name]; was != nil {
			e.pins.Maps[name] = was
			continue
		}
		m, err := ebpf.NewMap(spec)
		if err != nil {
			return made, fmt.Errorf("making the map %s: %w", spec.Name, err)
		}
		made = append(made, m)
		e.pins.Maps[name] = m
	}
	if roomOf(old.Maps) == 0 && roomOf(e.pins.Maps) > 0 {
		err = e.mark(true)
	}
	return made, err
}

// migrate fills the maps that are new with what the old ones say, and attaches
// what must run before that. The caller closes the links, also after an error.
func (e *engine) migrate(old *kernel.Opened, c *kernel.Collection) (links map[string]kernel.Link, err error) {
	links = map[string]kernel.Link{}
	if p := c.Programs[bpf.SteerProgSteerExit]; p != nil {
		if links["exit"], err = exitTracepoint.Attach(p); err != nil {
			delete(links, "exit")
			return links, err
		}
	}
	kernel.Step("steer:exit attached")
	if old.Maps["listens"] == nil { // sync, which follows, knows better
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

// finishUpgrade is for an engine that is marked: an upgrade may have been killed,
// or is about to end. It comes before sync, which puts the services' maps to use.
func (e *engine) finishUpgrade() error {
	if e.kind == EngineReuseport && e.pins.Meta.Object == hashOf(e.kind) {
		return e.renewGroups() // else they still run what the pins say, or another upgrade comes
	}
	return nil
}

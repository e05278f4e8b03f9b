// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Upgrader = Feature{}

// Outdated is an engine whose program another weir put in place.
type Outdated struct {
	Netns   string `json:"netns"` // as the kernel names it: net:[4026531840]
	Engine  Engine `json:"engine"`
	ABI     uint32 `json:"abi"`
	Object  string `json:"object"`  // the beginning of the SHA-256 of the BPF object
	Version string `json:"version"` // of the weir that put it there
	scope   string
}

// String is the change that an upgrade makes.
func (o Outdated) String() string {
	s := fmt.Sprintf("object %s → %s", o.Object, shortHash(hashOf(o.Engine)))
	if o.ABI < ABI {
		s += fmt.Sprintf(", ABI %d → %d", o.ABI, ABI)
	} else if olderABI(o.ABI) {
		s += fmt.Sprintf(", ABI %d → %d", o.ABI, dispatchABI)
	}
	if o.Version != Version {
		s += fmt.Sprintf(", weir %s → %s", o.Version, Version)
	}
	return s
}

func shortHash(h [sha256.Size]byte) string { return fmt.Sprintf("%x", h[:6]) }

// olderABI says whether an engine's maps are laid out otherwise than this weir's: all
// above [ABI] are of engines where something is bound.
func olderABI(abi uint32) bool { return abi < ABI || abi > ABI && abi < dispatchABI }

// knownABI refuses pins of a newer weir than one whose ABI is newest.
func knownABI(m kernel.Meta, newest uint32, what string) error {
	if m.ABI <= newest {
		return nil
	}
	return fmt.Errorf("%w: %s has ABI %d, made by weir %s, and this weir knows %d at most: use that weir; nothing was changed",
		kernel.ErrABI, what, m.ABI, m.Version, newest)
}

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
		if err := knownABI(m, dispatchABI, "namespace "+i.Scope); err != nil {
			return nil, err
		}
		if olderABI(m.ABI) || m.Object != hashOf(kind) {
			out = append(out, Outdated{Netns: fmt.Sprintf("net:[%s]", i.Scope), Engine: kind,
				ABI: m.ABI, Object: shortHash(m.Object), Version: m.Version, scope: i.Scope})
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
	if err := knownABI(old.Meta, dispatchABI, "namespace "+scope); err != nil {
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
	if old.Maps["exits"] != nil && c.Programs[steerProgSteerExit] == nil {
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
	return e.lateExits(old)
}

// goOver is the moment of the change.
func (e *engine) goOver(c *kernel.Collection, links map[string]kernel.Link) error {
	u := kernel.Upgrade{Meta: e.pins.Meta, Pins: kernel.Pins{Maps: e.pins.Maps, Links: links}}
	u.Meta.ABI, u.Meta.Object, u.Meta.Version, u.Meta.Created = engineABI(e.pins.Maps), hashOf(e.kind), Version, time.Now()
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
	if err == nil && !marked && e.pins.Meta.ABI == ABI {
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
	if old.Meta.ABI < ABI {
		// What it holds may have changed, which it does not show.
		delete(share, steerMapSteerServices)
	}
	if share[steerMapSteerSlots] == nil {
		// Two programs withdraw slots for a while, each its own: with one list the first
		// to hear of an exit would take the entry away from the other.
		delete(share, steerMapSteerExits)
	}
	return share, nil
}

// migrate fills the maps that are new with what the old ones say, and attaches
// what must run before that. The caller closes the links, also after an error.
func (e *engine) migrate(old *kernel.Opened, c *kernel.Collection) (links map[string]kernel.Link, err error) {
	links = map[string]kernel.Link{}
	if e.renewed(old, "exits") {
		if err := e.copyExits(old); err != nil {
			return links, err
		}
	}
	kernel.Step("steer:exits copied")
	if p := c.Programs[steerProgSteerExit]; p != nil {
		// Before slots are copied: a process that exits from now on is seen by this one as well.
		if links["exit"], err = exitTracepoint.Attach(p); err != nil {
			delete(links, "exit")
			return links, err
		}
	}
	kernel.Step("steer:exit attached")
	if e.renewed(old, "slots") {
		if err := e.copySlots(old); err != nil {
			return links, err
		}
	}
	kernel.Step("steer:slots copied")
	if e.renewed(old, "services") {
		for _, p := range e.services {
			if err := e.putService(p); err != nil {
				return links, err
			}
		}
	}
	kernel.Step("steer:services copied")
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
	for _, p := range e.services {
		if p.abi >= ABI {
			continue
		}
		if p.Service.OnEmpty == Drop && e.kind == EngineSkLookup {
			// The holder of the older weir ends when it reads what comes now. Should this one not
			// start, empty slots reject, and status says so.
			_ = e.replaceHolder()
		}
		if err := e.publishService(p); err != nil {
			return err
		}
		kernel.Step("steer:republished")
	}
	if e.kind == EngineReuseport && e.pins.Meta.Object == hashOf(e.kind) {
		return e.renewGroups() // else they still run what the pins say, or another upgrade comes
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"crypto/sha256"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
	"github.com/weir-project/weir/kernel/probe"
	"github.com/weir-project/weir/table"
)

// Engine is one engine of a network namespace: its maps, open for writing, and
// the services that it steers. Two kinds have the same maps but for those that
// hold sockets.
type Engine struct {
	Lock     *kernel.WriteLock
	Scope    string
	Kind     spec.Engine
	Pins     *kernel.Opened
	Services map[string]*record.Service
	Kept     record.Kept        // what services that cannot be read have
	vet      *Vetting           // what to do about members' checks; nil: none is run
	Rate     *spec.Rate         // of resets that this command makes due; nil: the services'
	Coming   map[int]ServedSlot // by slot: members of a service that comes from another engine
}

// PublishEngine makes an engine in a namespace that has none of the kind yet, with
// room for so many bindings. With empty maps it lets every packet pass.
func PublishEngine(l *kernel.WriteLock, ns *netns.Handle, kind spec.Engine, room int) error {
	if err := kernel.Require(spec.EngineNeeds(kind)); err != nil {
		return err
	}
	c, err := loadPrograms(kind, room, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	pins := kernel.Pins{Maps: pinnedMaps(c)}
	for _, spec := range ownMaps(kind, room) {
		m, err := ebpf.NewMap(spec)
		if err != nil {
			return fmt.Errorf("making the map %s: %w", spec.Name, err)
		}
		defer m.Close()
		pins.Maps[strings.TrimPrefix(spec.Name, "steer_")] = m
	}
	pins.Links, err = attachEngine(kind, c, ns)
	for _, ln := range pins.Links {
		defer ln.Close()
	}
	if err != nil {
		return err
	}
	return record.EngineStore(kind).Publish(l, record.EngineInstance(record.Scope(ns), kind), instances.Form[struct{}]{Netns: ns, Pins: pins})
}

// attachEngine attaches an engine's programs. The caller closes the links, also after an error.
func attachEngine(kind spec.Engine, c *kernel.Collection, ns *netns.Handle) (map[string]kernel.Link, error) {
	links := map[string]kernel.Link{}
	at := map[string]kernel.Attachment{}
	if c.Programs[bpf.SteerProgSteerExit] != nil {
		at["exit"] = exitTracepoint
	}
	programs := map[string]*ebpf.Program{"exit": c.Programs[bpf.SteerProgSteerExit], "lookup": lookupProgram(c)}
	if kind == spec.EngineSkLookup {
		at["lookup"] = kernel.NetnsLookup{FD: ns.FD(), Inode: ns.Inode()}
	}
	for name, a := range at {
		ln, err := a.Attach(programs[name])
		if err != nil {
			return links, err
		}
		links[name] = ln
	}
	return links, nil
}

// exitTracepoint tells of exits of processes.
var exitTracepoint = kernel.RawTracepoint{Name: "sched_process_exit"}

// ObjectHash is the hash of an engine's object.
func ObjectHash(kind spec.Engine) [sha256.Size]byte {
	return kernel.ObjectHash(record.EngineStore(kind).Object())
}

// loadPrograms loads the programs of an engine that this kernel can have. share
// gives maps in place of new ones. The program of sk_reuseport is loaded again for
// each group; here, for the maps that all share.
func loadPrograms(kind spec.Engine, room int, share map[string]*ebpf.Map) (*kernel.Collection, error) {
	cs, err := loadSpec(kind, room)
	if err != nil {
		return nil, err
	}
	programs := []string{bpf.SteerProgSteerLookup}
	switch {
	case kind == spec.EngineReuseport:
		programs = []string{bpf.ReuseProgSteerReuse}
	case room > 0:
		programs = []string{bpf.SteerProgSteerDispatch}
	}
	if probe.ExitTracepoint.Check() == nil {
		programs = append(programs, bpf.SteerProgSteerExit)
	}
	return kernel.Load(cs, programs, share)
}

// loadSpec is the object of an engine with room for so many bindings.
func loadSpec(kind spec.Engine, room int) (*ebpf.CollectionSpec, error) {
	load := bpf.LoadSteer
	if kind == spec.EngineReuseport {
		load = bpf.LoadReuse
	}
	spec, err := load()
	if err == nil && room > 0 {
		err = table.SizeBindings(spec, boundName, room)
	}
	return spec, err
}

// lookupProgram is the program of a collection that answers lookups; nil for sk_reuseport.
func lookupProgram(c *kernel.Collection) *ebpf.Program {
	if p := c.Programs[bpf.SteerProgSteerDispatch]; p != nil {
		return p
	}
	return c.Programs[bpf.SteerProgSteerLookup]
}

// pinnedMaps are the maps of a collection by the names of their pins.
func pinnedMaps(c *kernel.Collection) map[string]*ebpf.Map {
	out := map[string]*ebpf.Map{}
	for name, m := range c.Maps {
		if !strings.HasPrefix(name, ".") {
			out[strings.TrimPrefix(name, "steer_")] = m
		}
	}
	return out
}

// ownMaps are the maps that only user space knows.
func ownMaps(kind spec.Engine, room int) []*ebpf.MapSpec {
	specs := []*ebpf.MapSpec{{Name: "steer_sync", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 2}}
	if kind == spec.EngineReuseport {
		specs = append(specs, groupMaps()...)
	}
	if room > 0 {
		specs = append(specs, dispatchMaps()...)
	}
	return specs
}

// OpenEngine opens a namespace's engine for writing and recovers what a killed
// command left between the pins of services and the engine's maps.
func OpenEngine(l *kernel.WriteLock, scope string, kind spec.Engine) (*Engine, error) {
	pins, err := l.Open(record.EngineInstance(scope, kind))
	if err != nil {
		return nil, err
	}
	e := &Engine{Lock: l, Scope: scope, Kind: kind, Pins: pins}
	if err = pins.Meta.RequireABI(pins.Instance, record.ABI); err == nil {
		err = e.readServices()
	}
	if err == nil {
		var unfinished bool
		if unfinished, err = e.marked(); err == nil && unfinished {
			if err = e.finishUpgrade(); err == nil {
				err = e.Reconcile()
			}
		}
	}
	if err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

// readServices reads the services of the engine, and what those that cannot be read have in its maps.
func (e *Engine) readServices() error {
	all, unread, err := record.ReadAll(e.Lock.Root, e.Scope, e.Kind)
	if err == nil {
		e.Services, e.Kept = all, record.ReadKept(e.Lock, e.Pins, unread)
	}
	return err
}

// readAgain is for a service that could not be read, and can be now or is gone: nothing of its former form is kept.
func (e *Engine) readAgain(name string) error {
	if !e.Kept.HasName(name) {
		return nil
	}
	_, unread, err := record.ReadAll(e.Lock.Root, e.Scope, e.Kind)
	e.Kept = e.Kept.Again(e.Lock, e.Pins, unread)
	return err
}

// Close closes the maps; everything stays pinned.
func (e *Engine) Close() { e.Pins.Close() }

// Drop takes a service out of what the maps are to say. Sync, which follows, removes what they have of it.
func (e *Engine) Drop(name string) {
	if p := e.Services[name]; p != nil {
		e.Kept.Free(p)
		delete(e.Services, name)
	}
}

// Idle tells whether the engine has no service, readable or not.
func (e *Engine) Idle() bool { return len(e.Services)+len(e.Kept.Names) == 0 }

// keeps tells whether a number is that of a service that cannot be read.
func (e *Engine) keeps(id uint32) bool {
	if len(e.Kept.Names) == 0 || !e.Kept.ID(id) {
		return false
	}
	for _, p := range e.Services {
		if p.ID == id {
			return false
		}
	}
	return true
}

// PublishService writes a service's own pins. The engine's maps follow by Reconcile,
// in this command or the next.
func (e *Engine) PublishService(p *record.Service) error {
	m, err := record.NewMap(p)
	if err != nil {
		return err
	}
	defer m.Close()
	maps := map[string]*ebpf.Map{"service": m}
	if p.Devices != nil {
		if maps["aliases"], maps["names"], err = e.pinDevices(p); err != nil {
			return err
		}
		defer maps["aliases"].Close()
		defer maps["names"].Close()
	}
	if p.Service.Generations != nil {
		if maps["peers"], err = e.pinPeers(p); err != nil {
			return err
		}
		defer maps["peers"].Close()
	}
	meta, err := record.Services.Meta(instances.Form[record.Service]{Spec: *p, Object: e.Pins.Meta.Object})
	if err != nil {
		return err
	}
	meta.Inode, meta.Cookie = e.Pins.Meta.Inode, e.Pins.Meta.Cookie
	if err := e.Lock.Publish(record.Instance(e.Scope, p.Service.Name), meta, kernel.Pins{Maps: maps}); err != nil {
		return err
	}
	e.Drop(p.Service.Name) // its former form
	e.Services[p.Service.Name] = p
	return e.readAgain(p.Service.Name)
}

// FreeID finds an index into steer_services that no service has.
func (e *Engine) FreeID() (uint32, error) {
	if err := e.Kept.CheckID(); err != nil {
		return 0, err
	}
	taken := map[uint32]bool{}
	for _, p := range e.Services {
		taken[p.ID] = true
	}
	for id := range uint32(spec.MaxServices) {
		if !taken[id] && !e.Kept.ID(id) {
			return id, nil
		}
	}
	return 0, fmt.Errorf("namespace %s has %d services, the most it can: remove one", e.Scope, spec.MaxServices)
}

// rows are those that services have.
func (e *Engine) rows() map[uint32]bool {
	taken := map[uint32]bool{}
	for _, p := range e.Services {
		for _, row := range append(p.Rows[:len(p.Rows):len(p.Rows)], p.Spare...) {
			taken[row] = true
		}
	}
	return taken
}

// FreeRows finds n rows that no service has, and that are not among others.
func (e *Engine) FreeRows(n int, others ...uint32) ([]uint32, error) {
	if err := e.Kept.CheckRows(); err != nil && n > 0 {
		return nil, err
	}
	taken := e.rows()
	for _, row := range others {
		taken[row] = true
	}
	var rows []uint32
	for row := uint32(0); row < spec.MaxRows && len(rows) < n; row++ {
		if !taken[row] && !e.Kept.Row(row) {
			rows = append(rows, row)
		}
	}
	if len(rows) < n {
		return nil, fmt.Errorf("namespace %s has no %d slots left of its %d: remove a service", e.Scope, n, spec.MaxRows)
	}
	return rows, nil
}

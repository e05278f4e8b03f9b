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

// Engine is one engine of a network namespace: its maps, open for writing, and its services. The two kinds differ only
// in the maps of sockets.
type Engine struct {
	Lock     *kernel.WriteLock
	Scope    string
	Kind     spec.Engine
	Pins     *kernel.Opened
	Services map[string]*record.Service
	Kept     record.Kept        // entries of unreadable services in the maps
	vet      *Vetting           // how to run members' checks; nil: run none
	Rate     *spec.Rate         // of resets that this command makes due; nil: the service's rate
	Coming   map[int]ServedSlot // by slot: members of a service that moves here from another engine
}

// PublishEngine creates an engine in a namespace without one of this kind. room is the maximum number of bindings. With
// empty maps the engine passes every packet.
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
			return fmt.Errorf("create map %s: %w", spec.Name, err)
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

// exitTracepoint runs when a process exits.
var exitTracepoint = kernel.RawTracepoint{Name: "sched_process_exit"}

func ObjectHash(kind spec.Engine) [sha256.Size]byte {
	return kernel.ObjectHash(record.EngineStore(kind).Object())
}

// loadPrograms loads the engine's programs supported by this kernel. share replaces new maps by existing ones. Each
// reuseport group loads its own copy of the sk_reuseport program later. The copy loaded here creates the shared maps.
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

// loadSpec returns an engine's object, sized for room bindings.
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

// lookupProgram returns the collection's sk_lookup program, or nil for engine sk_reuseport.
func lookupProgram(c *kernel.Collection) *ebpf.Program {
	if p := c.Programs[bpf.SteerProgSteerDispatch]; p != nil {
		return p
	}
	return c.Programs[bpf.SteerProgSteerLookup]
}

// pinnedMaps returns a collection's maps by pin name.
func pinnedMaps(c *kernel.Collection) map[string]*ebpf.Map {
	out := map[string]*ebpf.Map{}
	for name, m := range c.Maps {
		if !strings.HasPrefix(name, ".") {
			out[strings.TrimPrefix(name, "steer_")] = m
		}
	}
	return out
}

// ownMaps returns the specs of the maps used by user space only.
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

// OpenEngine opens a namespace's engine for writing. It first reconciles the engine's maps with the services' pins if a
// killed command left them different.
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

// readServices reads the engine's services, and the entries of unreadable services in its maps.
func (e *Engine) readServices() error {
	all, unread, err := record.ReadAll(e.Lock.Root, e.Scope, e.Kind)
	if err == nil {
		e.Services, e.Kept = all, record.ReadKept(e.Lock, e.Pins, unread)
	}
	return err
}

// readAgain drops the kept entries of a previously unreadable service after its repair or removal.
func (e *Engine) readAgain(name string) error {
	if !e.Kept.HasName(name) {
		return nil
	}
	_, unread, err := record.ReadAll(e.Lock.Root, e.Scope, e.Kind)
	e.Kept = e.Kept.Again(e.Lock, e.Pins, unread)
	return err
}

func (e *Engine) Close() { e.Pins.Close() }

// Drop removes a service from the wanted state. The next Reconcile removes its entries from the maps.
func (e *Engine) Drop(name string) {
	if p := e.Services[name]; p != nil {
		e.Kept.Free(p)
		delete(e.Services, name)
	}
}

// Idle reports whether the engine has no service, readable or not.
func (e *Engine) Idle() bool { return len(e.Services)+len(e.Kept.Names) == 0 }

// keeps reports whether id belongs to an unreadable service.
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

// PublishService writes a service's own pins. Reconcile updates the engine's maps, in this command or the next.
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
	e.Drop(p.Service.Name) // its previous form
	e.Services[p.Service.Name] = p
	return e.readAgain(p.Service.Name)
}

// FreeID finds an unused index into steer_services.
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
	return 0, fmt.Errorf("namespace %s has %d services, the maximum: remove one", e.Scope, spec.MaxServices)
}

// rows returns the rows in use by readable services.
func (e *Engine) rows() map[uint32]bool {
	taken := map[uint32]bool{}
	for _, p := range e.Services {
		for _, row := range append(p.Rows[:len(p.Rows):len(p.Rows)], p.Spare...) {
			taken[row] = true
		}
	}
	return taken
}

// FreeRows finds n unused rows outside others.
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
		return nil, fmt.Errorf("namespace %s has fewer than %d of its %d slots left: remove a service", e.Scope, n, spec.MaxRows)
	}
	return rows, nil
}

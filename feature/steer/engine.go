// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
	"golang.org/x/sys/unix"
)

// Version is recorded in the pins; the command sets it.
var Version = "devel"

// published is a service as its pins describe it: the truth that the engine's
// maps follow.
type published struct {
	Service Service  `json:"service"`         // defaults filled in, seed drawn
	Netns   string   `json:"netns"`           // as people know the namespace
	Engine  Engine   `json:"engine"`          // the one that was chosen
	Why     string   `json:"why"`             // it was
	ID      uint32   `json:"id"`              // index into steer_services
	Rows    []uint32 `json:"rows"`            // of the engine's maps, by slot: a slot keeps its row for life, or its two
	Spare   []uint32 `json:"spare,omitempty"` // with generations: the other rows, by slot

	live

	table  []uint16 // bucket to slot; it is in the service's own map
	cookie uint64   // of its namespace, or 0

	recorded bool // its pins are damaged: this is what was recorded of it
}

func (p *published) row(slot int) uint32 { return p.Rows[slot] }

// engine is one engine of a network namespace: its maps, open for writing, and
// the services that it steers. Two kinds have the same maps but for those that
// hold sockets.
type engine struct {
	lock     *kernel.WriteLock
	scope    string
	kind     Engine
	pins     *kernel.Opened
	services map[string]*published
	vet      *vetting         // what to do about members' checks; nil: none is run
	rate     *Rate            // of resets that this command makes due; nil: the services'
	coming   map[int]heldSlot // by slot: members of a service that comes from another engine
}

// kinds are the engines that a namespace may have.
var kinds = []Engine{EngineSkLookup, EngineReuseport}

func scopeOf(ns *netns.Handle) string { return strconv.FormatUint(ns.Inode(), 10) }

func engineInstance(scope string, kind Engine) kernel.Instance {
	name := lookupName
	if kind == EngineReuseport {
		name = reuseName
	}
	return kernel.Instance{Scope: scope, Feature: Name, Name: name}
}

// kindOf says which engine an instance is.
func kindOf(i kernel.Instance) (kind Engine, ok bool) {
	for _, k := range kinds {
		if engineInstance(i.Scope, k) == i {
			return k, true
		}
	}
	return "", false
}

func serviceInstance(scope, name string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: Name, Name: name}
}

// objectOf is the BPF object of an engine.
func objectOf(kind Engine) (elf []byte, load func() (*ebpf.CollectionSpec, error)) {
	if kind == EngineReuseport {
		return bpf.ReuseObject, bpf.LoadReuse
	}
	return bpf.SteerObject, bpf.LoadSteer
}

// publishEngine makes an engine in a namespace that has none of the kind yet, with
// room for so many bindings. With empty maps it lets every packet pass.
func publishEngine(l *kernel.WriteLock, ns *netns.Handle, kind Engine, room int) error {
	if err := kernel.Require(engineNeeds(kind)); err != nil {
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
	meta := kernel.Meta{ABI: ABI, Object: hashOf(kind), Inode: ns.Inode(), Created: time.Now(), Version: Version}
	meta.Cookie, _ = ns.Cookie() // 0 where the kernel has none
	return l.Publish(engineInstance(scopeOf(ns), kind), meta, pins)
}

// attachEngine attaches an engine's programs. The caller closes the links, also after an error.
func attachEngine(kind Engine, c *kernel.Collection, ns *netns.Handle) (map[string]kernel.Link, error) {
	links := map[string]kernel.Link{}
	at := map[string]kernel.Attachment{}
	if c.Programs[bpf.SteerProgSteerExit] != nil {
		at["exit"] = exitTracepoint
	}
	programs := map[string]*ebpf.Program{"exit": c.Programs[bpf.SteerProgSteerExit], "lookup": lookupProgram(c)}
	if kind == EngineSkLookup {
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

// hashOf is the hash of an engine's object.
func hashOf(kind Engine) [sha256.Size]byte {
	elf, _ := objectOf(kind)
	return kernel.ObjectHash(elf)
}

// loadPrograms loads the programs of an engine that this kernel can have. share
// gives maps in place of new ones. The program of sk_reuseport is loaded again for
// each group; here, for the maps that all share.
func loadPrograms(kind Engine, room int, share map[string]*ebpf.Map) (*kernel.Collection, error) {
	spec, err := specOf(kind, room)
	if err != nil {
		return nil, err
	}
	programs := []string{bpf.SteerProgSteerLookup}
	switch {
	case kind == EngineReuseport:
		programs = []string{bpf.ReuseProgSteerReuse}
	case room > 0:
		programs = []string{bpf.SteerProgSteerDispatch}
	}
	if kernel.ExitTracepoint.Check() == nil {
		programs = append(programs, bpf.SteerProgSteerExit)
	}
	return kernel.Load(spec, programs, share)
}

// specOf is the object of an engine with room for so many bindings.
func specOf(kind Engine, room int) (*ebpf.CollectionSpec, error) {
	_, load := objectOf(kind)
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
func ownMaps(kind Engine, room int) []*ebpf.MapSpec {
	specs := []*ebpf.MapSpec{{Name: "steer_sync", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 2}}
	if kind == EngineReuseport {
		specs = append(specs, groupMaps()...)
	}
	if room > 0 {
		specs = append(specs, dispatchMaps()...)
	}
	return specs
}

// openEngine opens a namespace's engine for writing and mends what a killed
// command left between the pins of services and the engine's maps.
func openEngine(l *kernel.WriteLock, scope string, kind Engine) (*engine, error) {
	pins, err := l.Open(engineInstance(scope, kind))
	if err != nil {
		return nil, err
	}
	e := &engine{lock: l, scope: scope, kind: kind, pins: pins}
	if err = pins.Meta.RequireABI(pins.Instance, ABI); err == nil {
		e.services, err = readServices(l.Root, scope, kind)
	}
	if err == nil {
		var unfinished bool
		if unfinished, err = e.marked(); err == nil && unfinished {
			if err = e.finishUpgrade(); err == nil {
				err = e.sync()
			}
		}
	}
	if err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

// Close closes the maps; everything stays pinned.
func (e *engine) Close() { e.pins.Close() }

// readServices reads the published services of a namespace's engine.
func readServices(r *kernel.Root, scope string, kind Engine) (map[string]*published, error) {
	all, err := r.Known(Name) // a service that lost its pins keeps what the engine has of it
	if err != nil {
		return nil, err
	}
	out := map[string]*published{}
	for _, i := range all {
		if i.Scope != scope || !kernel.ValidName(i.Name) {
			continue
		}
		p, err := readService(r, i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			return nil, err
		}
		if p.Engine == kind {
			out[i.Name] = p
		}
	}
	return out, nil
}

// readService reads a service as it is pinned or, where pins of it were lost, as it was recorded.
func readService(r *kernel.Root, i kernel.Instance) (*published, error) {
	p, err := readPinned(r, i)
	if errors.Is(err, kernel.ErrNotExist) {
		if was, rerr := readRecorded(r, i); rerr == nil {
			return was, nil
		}
	}
	return p, err
}

func readPinned(r *kernel.Root, i kernel.Instance) (*published, error) {
	o, err := r.Open(i, "service")
	if err != nil {
		return nil, err
	}
	defer o.Close()
	if err := o.Meta.RequireABI(i, ABI); err != nil {
		return nil, err
	}
	p := &published{}
	if err := json.Unmarshal(o.Meta.Config, p); err != nil {
		return nil, fmt.Errorf("the pins of service %s: %w", i.Name, err)
	}
	p.Service.Name, p.cookie = i.Name, o.Meta.Cookie
	p.Service = p.Service.withDefaults() // of options that the weir that wrote it did not have
	var value bpf.SteerService
	if err := o.Maps["service"].Lookup(uint32(0), &value); err != nil {
		return nil, fmt.Errorf("the table of service %s: %w", i.Name, err)
	}
	p.table = slices.Clone(value.Bucket[:])
	return p, nil
}

// publishService writes a service's own pins. The engine's maps follow by sync,
// in this command or the next.
func (e *engine) publishService(p *published) error {
	m, err := newInner(p)
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
	config, err := json.Marshal(p)
	if err != nil {
		return err
	}
	meta := kernel.Meta{ABI: ABI, Object: e.pins.Meta.Object, Cookie: e.pins.Meta.Cookie, Inode: e.pins.Meta.Inode,
		Created: time.Now(), Version: Version, Config: config}
	err = e.lock.Publish(serviceInstance(e.scope, p.Service.Name), meta, kernel.Pins{Maps: maps})
	if err != nil {
		return err
	}
	e.services[p.Service.Name] = p
	return nil
}

// value is the service as the program reads it.
func (p *published) value() *bpf.SteerService {
	v := &bpf.SteerService{Seed: *p.Service.Seed, Slots: uint32(p.Service.Slots), Endpoints: uint32(len(p.Service.Endpoints())),
		OnEmpty: uint32(slices.Index(onEmptyCodes, p.Service.OnEmpty)), Id: p.ID}
	p.setPolicy(v)
	v.Tick = jiffy()
	copy(v.Bucket[:], p.table)
	if p.Service.Migrate {
		v.Flags |= flagMigrate
	}
	if p.Service.Generations != nil {
		v.Flags |= flagGenerations
	}
	for slot, row := range p.Rows {
		v.Row[slot] = uint16(row)
	}
	return v
}

// jiffy is the length of a jiffy in nanoseconds: the resolution of the clocks that
// the kernel moves on with each (KTIME_LOW_RES, in kernel/time/posix-timers.c).
func jiffy() uint32 {
	var ts unix.Timespec
	if unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &ts) != nil {
		return 0 // cannot fail for this clock
	}
	return uint32(ts.Nano())
}

// innerSpec is the form of a service's map. To parse the object costs more than all else about a service.
var innerSpec = sync.OnceValues(func() (*ebpf.MapSpec, error) {
	spec, err := bpf.LoadSteer()
	if err != nil {
		return nil, err
	}
	return spec.Maps[bpf.SteerMapSteerServices].InnerMap, nil
})

// newInner makes a service's map, of the kind that steer_services holds.
func newInner(p *published) (*ebpf.Map, error) {
	spec, err := innerSpec()
	if err != nil {
		return nil, err
	}
	inner := spec.Copy()
	inner.Name = "steer_service"
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return nil, fmt.Errorf("making the map of a service: %w", err)
	}
	if err := m.Put(uint32(0), p.value()); err != nil {
		m.Close()
		return nil, fmt.Errorf("writing service %s: %w", p.Service.Name, err)
	}
	return m, nil
}

// freeID finds an index into steer_services that no service has.
func (e *engine) freeID() (uint32, error) {
	taken := map[uint32]bool{}
	for _, p := range e.services {
		taken[p.ID] = true
	}
	for id := range uint32(MaxServices) {
		if !taken[id] {
			return id, nil
		}
	}
	return 0, fmt.Errorf("namespace %s has %d services, the most it can: remove one", e.scope, MaxServices)
}

// rows are those that services have.
func (e *engine) rows() map[uint32]bool {
	taken := map[uint32]bool{}
	for _, p := range e.services {
		for _, row := range append(p.Rows[:len(p.Rows):len(p.Rows)], p.Spare...) {
			taken[row] = true
		}
	}
	return taken
}

// freeRows finds n rows that no service has, and that are not among others.
func (e *engine) freeRows(n int, others ...uint32) ([]uint32, error) {
	taken := e.rows()
	for _, row := range others {
		taken[row] = true
	}
	var rows []uint32
	for row := uint32(0); row < maxRows && len(rows) < n; row++ {
		if !taken[row] {
			rows = append(rows, row)
		}
	}
	if len(rows) < n {
		return nil, fmt.Errorf("namespace %s has no %d slots left of its %d: remove a service", e.scope, n, maxRows)
	}
	return rows, nil
}

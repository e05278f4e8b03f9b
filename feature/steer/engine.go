// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Version is recorded in the pins; the command sets it.
var Version = "devel"

// published is a service as its pins describe it: the truth that the engine's
// maps follow.
type published struct {
	Service Service  `json:"service"` // defaults filled in, seed drawn
	Netns   string   `json:"netns"`   // as people know the namespace
	ID      uint32   `json:"id"`      // index into steer_services
	Rows    []uint32 `json:"rows"`    // of the engine's maps, by slot: a slot keeps its row for life

	table []uint16 // bucket to slot; it is in the service's own map
}

func (p *published) row(slot int) uint32 { return p.Rows[slot] }

// engine is one network namespace's program and maps, open for writing, with
// the services that are published beside it.
type engine struct {
	lock     *kernel.WriteLock
	scope    string
	pins     *kernel.Opened
	services map[string]*published
}

func scopeOf(ns *netns.Handle) string { return strconv.FormatUint(ns.Inode(), 10) }

func engineInstance(scope string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: Name, Name: engineName}
}

func serviceInstance(scope, name string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: Name, Name: name}
}

// publishEngine loads the program into a namespace that has none yet. With
// empty maps it lets every packet pass.
func publishEngine(l *kernel.WriteLock, ns *netns.Handle) error {
	spec, err := loadSteer()
	if err != nil {
		return err
	}
	programs := []string{steerProgSteerLookup}
	exit := kernel.ExitTracepoint.Check() == nil
	if exit {
		programs = append(programs, steerProgSteerExit)
	}
	c, err := kernel.Load(spec, programs, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{}, Links: map[string]kernel.Link{}}
	for name, m := range c.Maps {
		if !strings.HasPrefix(name, ".") {
			pins.Maps[strings.TrimPrefix(name, "steer_")] = m
		}
	}
	sync, err := ebpf.NewMap(&ebpf.MapSpec{Name: "steer_sync", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return fmt.Errorf("making the mark of unfinished changes: %w", err)
	}
	defer sync.Close()
	pins.Maps["sync"] = sync
	at := map[string]kernel.Attachment{"lookup": kernel.NetnsLookup{FD: ns.FD(), Inode: ns.Inode()}}
	if exit {
		at["exit"] = kernel.RawTracepoint{Name: "sched_process_exit"}
	}
	for name, a := range at {
		ln, err := a.Attach(c.Programs["steer_"+name])
		if err != nil {
			return err
		}
		defer ln.Close()
		pins.Links[name] = ln
	}
	meta := kernel.Meta{ABI: ABI, Object: kernel.ObjectHash(_SteerBytes), Inode: ns.Inode(), Created: time.Now(), Version: Version}
	meta.Cookie, _ = ns.Cookie() // 0 where the kernel has none
	return l.Publish(engineInstance(scopeOf(ns)), meta, pins)
}

// openEngine opens a namespace's engine for writing and mends what a killed
// command left between the pins of services and the engine's maps.
func openEngine(l *kernel.WriteLock, scope string) (*engine, error) {
	pins, err := l.Open(engineInstance(scope))
	if err != nil {
		return nil, err
	}
	e := &engine{lock: l, scope: scope, pins: pins}
	if pins.Meta.ABI != ABI {
		err = fmt.Errorf("%w: namespace %s is steered by maps of ABI %d, this weir knows %d", kernel.ErrABI, scope, pins.Meta.ABI, ABI)
	} else if e.services, err = readServices(l.Root, scope); err == nil {
		var unfinished bool
		if unfinished, err = e.marked(); err == nil && unfinished {
			err = e.sync()
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

// readServices reads the published services of a namespace from their meta.
func readServices(r *kernel.Root, scope string) (map[string]*published, error) {
	all, err := r.Instances(Name)
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
		out[i.Name] = p
	}
	return out, nil
}

func readService(r *kernel.Root, i kernel.Instance) (*published, error) {
	o, err := r.Open(i, "service")
	if err != nil {
		return nil, err
	}
	defer o.Close()
	if o.Meta.ABI != ABI {
		return nil, fmt.Errorf("%w: service %s has ABI %d, this weir knows %d", kernel.ErrABI, i.Name, o.Meta.ABI, ABI)
	}
	p := &published{}
	if err := json.Unmarshal(o.Meta.Config, p); err != nil {
		return nil, fmt.Errorf("the pins of service %s: %w", i.Name, err)
	}
	p.Service.Name = i.Name
	var value steerService
	if err := o.Maps["service"].Lookup(uint32(0), &value); err != nil {
		return nil, fmt.Errorf("the table of service %s: %w", i.Name, err)
	}
	p.table = slices.Clone(value.Bucket[:])
	return p, nil
}

// publishService writes a service's own pins. The engine's maps follow by sync,
// in this command or the next.
func (e *engine) publishService(p *published) error {
	value := &steerService{Seed: *p.Service.Seed, Slots: uint32(p.Service.Slots), Endpoints: uint32(len(p.Service.Endpoints())),
		OnEmpty: uint32(slices.Index(onEmptyCodes, p.Service.OnEmpty)), Id: p.ID}
	copy(value.Bucket[:], p.table)
	for slot, row := range p.Rows {
		value.Row[slot] = uint16(row)
	}
	m, err := e.newInner()
	if err != nil {
		return err
	}
	defer m.Close()
	if err := m.Put(uint32(0), value); err != nil {
		return fmt.Errorf("writing service %s: %w", p.Service.Name, err)
	}
	config, err := json.Marshal(p)
	if err != nil {
		return err
	}
	meta := kernel.Meta{ABI: ABI, Object: e.pins.Meta.Object, Cookie: e.pins.Meta.Cookie, Inode: e.pins.Meta.Inode,
		Created: time.Now(), Version: Version, Config: config}
	err = e.lock.Publish(serviceInstance(e.scope, p.Service.Name), meta, kernel.Pins{Maps: map[string]*ebpf.Map{"service": m}})
	if err != nil {
		return err
	}
	e.services[p.Service.Name] = p
	return nil
}

// newInner makes a map of the kind that steer_services holds.
func (e *engine) newInner() (*ebpf.Map, error) {
	spec, err := loadSteer()
	if err != nil {
		return nil, err
	}
	inner := spec.Maps[steerMapSteerServices].InnerMap.Copy()
	inner.Name = "steer_service"
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return nil, fmt.Errorf("making the map of a service: %w", err)
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

// freeRows finds n rows that no service has.
func (e *engine) freeRows(n int) ([]uint32, error) {
	taken := map[uint32]bool{}
	for _, p := range e.services {
		for _, row := range p.Rows {
			taken[row] = true
		}
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

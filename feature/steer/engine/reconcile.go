// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Reconcile makes the engine's maps match the pins of the services. The order is: first the entries a packet will need,
// then the ports that lead to them, then the removal of unreferenced entries. Reconcile adds, changes and removes
// services, and it recovers a killed command. It is idempotent and continues from any state of the maps.
func (e *Engine) Reconcile() error {
	if err := e.ReconcileMaps(); err != nil {
		return err
	}
	return e.Mark(false)
}

// ReconcileMaps is Reconcile, but leaves the mark in place.
func (e *Engine) ReconcileMaps() error {
	ports := e.reconcilePorts
	if e.Kind == spec.EngineReuseport {
		ports = e.reconcileGroups
	}
	for _, f := range []func() error{e.ReconcileServices, e.reconcileNamed, ports, e.dropRows} {
		if err := f(); err != nil {
			return fmt.Errorf("reconcile maps of namespace %s: %w", e.Scope, err)
		}
	}
	return nil
}

// Mark records in the pins whether the services' directories and the engine's maps may differ. A command that finds the
// mark reconciles. Without the mark, an admission need not read every map. On Linux 6.1 each lookup in a map of maps
// waits for a grace period.
func (e *Engine) Mark(differ bool) error {
	v := uint32(0)
	if differ {
		v = 1
	}
	if err := e.Pins.Maps["sync"].Put(uint32(0), v); err != nil {
		return fmt.Errorf("mark namespace %s: %w", e.Scope, err)
	}
	return nil
}

// marked reports whether a command was killed between Mark(true) and the end of Reconcile.
func (e *Engine) marked() (bool, error) { return IsMarked(e.Pins.Maps) }

// IsMarked is marked for readers without the lock. engine holds the engine's maps by pin name.
func IsMarked(engine map[string]*ebpf.Map) (bool, error) {
	var v uint32
	err := engine["sync"].Lookup(uint32(0), &v)
	return v != 0, err
}

// reconciledAtOnce is the number of services updated concurrently. It bounds the open descriptors.
const reconciledAtOnce = 64

// ReconcileServices points steer_services at each service's own map. One store per service switches every later packet
// to the changed service.
func (e *Engine) ReconcileServices() error {
	for chunk := range slices.Chunk(slices.Collect(maps.Values(e.Services)), reconciledAtOnce) {
		if err := e.reconcileMany(chunk); err != nil {
			return err
		}
	}
	return e.dropMoved()
}

// reconcileMany reconciles several services concurrently. The kernel ends each store in a map of maps with a wait for a
// grace period. Linux 6.1 also waits after each lookup: 20 ms a service on a busy host, 20 s for 1,000 services.
// Concurrent stores share one wait.
func (e *Engine) reconcileMany(services []*record.Service) error {
	var group errgroup.Group
	for _, p := range services {
		own, err := e.prepare(p)
		if err != nil {
			return errors.Join(err, group.Wait())
		}
		if own == nil {
			continue
		}
		group.Go(func() error {
			defer own.Close()
			return e.point(p, own.Maps["service"])
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for range services {
		kernel.Step("steer:service")
	}
	return nil
}

func (e *Engine) reconcileService(p *record.Service) error {
	return e.reconcileMany([]*record.Service{p})
}

// prepare fills the shared maps of a service and opens its own maps. It returns nil if the service's own maps are lost.
func (e *Engine) prepare(p *record.Service) (*kernel.Opened, error) {
	o, err := e.Lock.Open(record.Instance(e.Scope, p.Service.Name))
	if p.Recorded && (errors.Is(err, kernel.ErrNotExist) || errors.Is(err, kernel.ErrDamaged)) {
		return nil, nil // the engine still has the map, or the service's own recovery will restore it
	} else if err != nil {
		return nil, err
	}
	if err := errors.Join(e.putMoved(p), e.putAliases(p, o.Maps["aliases"]), e.putPeers(p, o.Maps["peers"])); err != nil {
		o.Close()
		return nil, fmt.Errorf("service %s: %w", p.Service.Name, err)
	}
	return o, nil
}

// point makes steer_services lead to a service's own map.
func (e *Engine) point(p *record.Service, own *ebpf.Map) error {
	services := e.Pins.Maps["services"]
	same, err := record.ContainsMap(services, p.ID, own)
	if err == nil && !same {
		err = services.Put(p.ID, own)
	}
	if err != nil {
		return fmt.Errorf("service %s: %w", p.Service.Name, err)
	}
	return nil
}

// ReconcileOne applies one service of engine sk_reuseport and leaves the mark. Reconcile does the rest. With engine
// sk_lookup, ReconcileOne does nothing, because Reconcile applies all services.
func (e *Engine) ReconcileOne(p, old *record.Service) error {
	if e.Kind == spec.EngineSkLookup {
		return nil
	}
	if err := e.reconcileService(p); err != nil {
		return err
	}
	if err := e.Pins.Maps["groups"].Put(serviceMark(p.ID), GroupValue{Service: p.ID}); err != nil || old == nil || old.ID == p.ID {
		return err
	}
	return e.free(p, old)
}

// free releases the groups, the id and the rows of a service's previous form, so its members' sockets can join other
// groups.
func (e *Engine) free(p, old *record.Service) error {
	groups, err := e.groups()
	if err != nil {
		return err
	}
	for k, v := range groups {
		if v.Service == old.ID && k.Proto != 0 {
			if err := e.dropGroup(k, v); err != nil {
				return err
			}
			kernel.Step("steer:port")
		}
	}
	if err := e.ClearIDs(map[uint32]bool{old.ID: true}); err != nil {
		return err
	}
	if err := e.Pins.Maps["groups"].Delete(serviceMark(old.ID)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	used := append(slices.Clone(p.Rows), p.Spare...)
	for _, row := range append(slices.Clone(old.Rows), old.Spare...) {
		if slices.Contains(used, row) {
			continue
		}
		var s bpf.SteerSlot
		if err := e.Pins.Maps["slots"].Lookup(row, &s); err != nil {
			return err
		}
		if err := e.clearRow(row, s); err != nil {
			return err
		}
	}
	return nil
}

// reconcilePorts adds prefixes before the ports that refer to them, and removes ports before their prefixes. A service
// referenced only by those ports is removed first: the ports then remain as a trace for recovery after a kill.
func (e *Engine) reconcilePorts() error {
	ports, prefixes := record.Ports(e.Services, Room(e.Pins.Maps) > 0)
	havePorts, err := Entries[bpf.SteerPortKey, bpf.SteerPortValue](e.Pins.Maps["ports"])
	if err != nil {
		return err
	}
	havePrefixes, err := Entries[bpf.SteerPrefixKey, bpf.SteerTarget](e.Pins.Maps["prefixes"])
	if err != nil {
		return err
	}
	e.keepPorts(ports, prefixes, havePorts, havePrefixes)
	if err := e.listens(true); err != nil {
		return err
	}
	err = errors.Join(
		putMissing(e.Pins.Maps["prefixes"], prefixes, havePrefixes),
		putMissing(e.Pins.Maps["ports"], ports, havePorts),
		e.dropServices(havePorts, havePrefixes),
		deleteOthers(e.Pins.Maps["ports"], ports, havePorts),
		deleteOthers(e.Pins.Maps["prefixes"], prefixes, havePrefixes))
	if err != nil || len(ports) > 0 {
		return err
	}
	return e.listens(false)
}

// keepPorts adds the entries of unreadable services to the wanted maps. If a readable service wants the same entry, the
// unreadable one keeps it.
func (e *Engine) keepPorts(ports map[bpf.SteerPortKey]bpf.SteerPortValue, prefixes map[bpf.SteerPrefixKey]bpf.SteerTarget,
	havePorts map[bpf.SteerPortKey]bpf.SteerPortValue, havePrefixes map[bpf.SteerPrefixKey]bpf.SteerTarget) {
	kept := func(t bpf.SteerTarget) bool { return t.Service != 0 && e.keeps(t.Service-1) }
	for k, t := range havePrefixes {
		if !kept(t) {
			continue
		}
		if Room(e.Pins.Maps) > 0 {
			t.Endpoint = t.Endpoint&0xff | (k.Prefixlen-32)<<8
		}
		if _, ok := prefixes[k]; !ok {
			key := bpf.SteerPortKey{Port: k.Port, Proto: k.Proto}
			v := ports[key]
			v.Prefixes++
			ports[key] = v
		}
		prefixes[k] = t
	}
	for k, have := range havePorts {
		v := ports[k]
		if kept(have.Any4) {
			v.Any4 = have.Any4
		}
		if kept(have.Any6) {
			v.Any6 = have.Any6
		}
		if v != (bpf.SteerPortValue{}) {
			ports[k] = v
		}
	}
}

// listens tells steer_dispatch whether any port is configured.
func (e *Engine) listens(some bool) error {
	m := e.Pins.Maps["listens"]
	if m == nil {
		return nil // no bindings: steer_lookup always checks the ports
	}
	v := uint32(0)
	if some {
		v = 1
	}
	return m.Put(uint32(0), v)
}

func Entries[K, V comparable](m *ebpf.Map) (map[K]V, error) {
	out := map[K]V{}
	var k K
	var v V
	it := m.Iterate()
	for it.Next(&k, &v) {
		out[k] = v
	}
	return out, it.Err()
}

func putMissing[K, V comparable](m *ebpf.Map, want, have map[K]V) error {
	for k, v := range want {
		if old, ok := have[k]; !ok || old != v {
			if err := m.Put(k, v); err != nil {
				return err
			}
			kernel.Step("steer:port")
		}
	}
	return nil
}

func deleteOthers[K, V comparable](m *ebpf.Map, want, have map[K]V) error {
	for k := range have {
		if _, ok := want[k]; !ok {
			if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
			kernel.Step("steer:port")
		}
	}
	return nil
}

// dropServices clears the ids referenced by ports but used by no service.
func (e *Engine) dropServices(ports map[bpf.SteerPortKey]bpf.SteerPortValue, prefixes map[bpf.SteerPrefixKey]bpf.SteerTarget) error {
	led := map[uint32]bool{}
	lead := func(t bpf.SteerTarget) {
		if t.Service != 0 { // id + 1
			led[t.Service-1] = true
		}
	}
	for _, v := range ports {
		lead(v.Any4)
		lead(v.Any6)
	}
	for _, t := range prefixes {
		lead(t)
	}
	return e.ClearIDs(led)
}

// ClearIDs removes the map entries of those ids without a service. The kernel ends each deletion from a map of maps
// with a wait for a grace period. Concurrent deletions share one wait.
func (e *Engine) ClearIDs(ids map[uint32]bool) error {
	for _, p := range e.Services {
		delete(ids, p.ID)
	}
	maps.DeleteFunc(ids, func(id uint32, _ bool) bool { return e.keeps(id) })
	var group errgroup.Group
	group.SetLimit(reconciledAtOnce)
	for id := range ids {
		group.Go(func() error {
			if err := e.Pins.Maps["services"].Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
			return errors.Join(e.dropAliases(id), e.dropPeers(id))
		})
	}
	if err := errors.Join(group.Wait(), e.DropDevices(ids)); err != nil {
		return err
	}
	for range ids {
		kernel.Step("steer:service")
	}
	return nil
}

// DropDevices removes the devices seen for removed services, because other services will reuse the ids.
func (e *Engine) DropDevices(ids map[uint32]bool) error {
	if len(ids) == 0 {
		return nil
	}
	all, err := Entries[bpf.SteerDeviceKey, bpf.SteerDevice](e.Pins.Maps["devices"])
	if err != nil {
		return err
	}
	for k := range all {
		if ids[k.Service] {
			if err := e.Pins.Maps["devices"].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
		}
	}
	return nil
}

// dropRows empties the rows of no service. The next service to use a row then finds no foreign sockets or counters.
func (e *Engine) dropRows() error {
	used := e.rows()
	rows := make([]bpf.SteerSlot, spec.MaxRows)
	var cursor ebpf.MapBatchCursor
	_, err := e.Pins.Maps["slots"].BatchLookup(&cursor, make([]uint32, spec.MaxRows), rows, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // ErrKeyNotExist marks the last batch
		return fmt.Errorf("read slots: %w", err)
	}
	for row, s := range rows {
		if !used[uint32(row)] && !e.Kept.Row(uint32(row)) && s != (bpf.SteerSlot{}) {
			if err := e.clearRow(uint32(row), s); err != nil {
				return err
			}
		}
	}
	return nil
}

// clearRow empties a row. It changes the state first, because the program decides by the state.
func (e *Engine) clearRow(row uint32, s bpf.SteerSlot) error {
	marked := s
	marked.State = uint32(slots.Changing)
	if err := e.Pins.Maps["slots"].Put(row, marked); err != nil {
		return err
	}
	if err := e.forgetExits(row); err != nil {
		return err
	}
	for ep := range uint32(spec.MaxEndpoints) {
		if err := e.Pins.Maps["sockets"].Delete(row*spec.MaxEndpoints + ep); err != nil && !Gone(err) {
			return err
		}
	}
	for proto := range uint32(2) {
		if err := kernel.ZeroPerCPU[bpf.SteerVerdicts](e.Pins.Maps["verdicts"], row*2+proto); err != nil {
			return err
		}
	}
	if e.Kind == spec.EngineSkLookup {
		if err := e.Pins.Maps["gens"].Put(row, bpf.SteerGeneration{}); err != nil {
			return err
		}
	}
	return e.Pins.Maps["slots"].Put(row, bpf.SteerSlot{})
}

// Gone reports whether err means "entry already empty" for a socket map. Some kernels return EINVAL for it.
func Gone(err error) bool {
	return errors.Is(err, ebpf.ErrKeyNotExist) || errors.Is(err, unix.EINVAL)
}

// forgetExits removes a row from the exits map of steer_exit.
func (e *Engine) forgetExits(row uint32) error {
	m := e.Pins.Maps["exits"]
	if m == nil { // the exit hook is optional
		return nil
	}
	all, err := Entries[bpf.SteerExitKey, uint32](m)
	if err != nil {
		return err
	}
	for k, r := range all {
		if r != row {
			continue
		}
		// steer_exit stops at the first missing number, so the last entry fills the gap.
		last := k
		for _, ok := all[bpf.SteerExitKey{Tgid: k.Tgid, N: last.N + 1}]; ok; _, ok = all[bpf.SteerExitKey{Tgid: k.Tgid, N: last.N + 1}] {
			last.N++
		}
		if last != k {
			if err := m.Put(k, all[last]); err != nil {
				return err
			}
		}
		if err := m.Delete(last); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		return e.forgetExits(row) // again: the map has changed
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/locate"
	"github.com/weir-project/weir/feature/handoff/lb/places"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/tunnel"
)

// MaxBackends is the highest backend number.
const MaxBackends = spec.MaxBackends

// buckets is the number of buckets of a service. Each belongs to one backend.
const buckets = places.Buckets

// Backend is a backend of the data path. It needs [Options].TunnelMTU for its tunnel.
type Backend = places.Backend

func (f *DataPath) locations() places.Maps {
	return places.Maps{MACs: f.maps.LbMacs, Tunnels: f.maps.LbTunnels}
}

// SetBackends replaces the backends of all services. Known flows keep their backend. New flows follow the weights.
func (f *DataPath) SetBackends(backends []Backend) error {
	if err := places.Check(backends); err != nil {
		return err
	}
	var errs []error
	for _, h := range backends {
		errs = append(errs, f.occupy(h)) // a backend with a missing interface does not block the others
	}
	f.mu.Lock()
	f.backends = slices.Clone(backends)
	f.mu.Unlock()
	for _, id := range f.serviceIDs() {
		errs = append(errs, f.spread(id))
	}
	return errors.Join(append(errs, f.dropBackends(backends))...)
}

// spread distributes new flows of a service by the backends' weights.
func (f *DataPath) spread(service int) error {
	f.mu.Lock()
	backends, known := slices.Clone(f.backends), f.backends != nil
	f.mu.Unlock()
	if !known {
		return nil // SetBackends spreads them later
	}
	keys := make([]uint32, buckets)
	for i := range keys {
		keys[i] = uint32(service*buckets + i)
	}
	if _, err := f.maps.LbRing.BatchUpdate(keys, places.Ring(backends, service), nil); err != nil {
		return fmt.Errorf("spread new flows of service %d: %w", service, err)
	}
	return nil
}

// spreads reports whether backends get new flows of a service.
func (f *DataPath) spreads(service int) bool {
	var first uint16
	return f.maps.LbRing.Lookup(uint32(service*buckets), &first) == nil && first != 0
}

// elsewhere reports whether the hash of a flow leads to another backend than its owner.
func (f *DataPath) elsewhere(k Key, owner move.Backend) bool {
	var found uint16
	at := uint32(spec.ServiceNumber(k.Service)*buckets + k.Bucket())
	return f.maps.LbRing.Lookup(at, &found) == nil && move.Backend(found) != owner
}

// matches reports whether the number belongs to flows of a TCP service. With byFlow the service must also go by flow.
func (f *DataPath) matches(service int, byFlow bool) bool {
	f.buffer.mu.Lock()
	defer f.buffer.mu.Unlock()
	for _, s := range f.buffer.services {
		if s.Flows() == service && s.Proto == unix.IPPROTO_TCP && !(byFlow && s.BySource) {
			return true
		}
	}
	return false
}

// serves reports whether a backend serves this TCP service, and the service goes by flow.
func (f *DataPath) serves(backend move.Backend, service int) bool {
	of := f.matches(service, true)
	f.mu.Lock()
	defer f.mu.Unlock()
	return of && slices.ContainsFunc(f.backends, func(h Backend) bool {
		return h.Number == backend && (h.Services == nil || slices.Contains(h.Services, spec.ServiceNumber(service)))
	})
}

// occupy writes a backend's name and location. The backend is no longer vacant.
func (f *DataPath) occupy(h Backend) error {
	if o, owned := f.names.Owner(h.Number); !owned || o.Unknown() { // another name may have got the number meanwhile
		if err := f.names.Keep(h.Number, h.Name); err != nil {
			return err
		}
	}
	if err := f.putBackend(h); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.vacant, h.Number)
	return nil
}

func (f *DataPath) putBackend(h Backend) error {
	if h.Tunnel.IsValid() {
		return f.putTunnel(h)
	}
	var from [6]uint8
	err := f.ns.Do(func() (err error) { from, err = locate.InterfaceMAC(h.Interface); return err })
	if err != nil {
		return fmt.Errorf("backend %s: %w", h.Name, err)
	}
	v := bpf.LBLbBackend{Ifindex: uint32(h.Interface), Mac: [6]uint8(h.MAC), From: from, Unwell: oneIf(h.Unwell)}
	if err := errors.Join(f.locations().Put(h.Key(), h.Number), f.maps.LbBackends.Put(uint32(h.Number), v)); err != nil {
		return fmt.Errorf("backend %s: %w", h.Name, err)
	}
	return nil
}

func (f *DataPath) putTunnel(h Backend) error {
	if f.tunnel == 0 {
		return fmt.Errorf("backend %s: it needs a tunnel: set lb.tunnel_mtu", h.Name)
	}
	far := h.Tunnel.Unmap()
	v := bpf.LBLbBackend{Ifindex: uint32(f.tunnel), Mac: [6]uint8(tunnel.BackendMAC), From: [6]uint8(tunnel.LBMAC), Tunnel: far.As16(), Unwell: oneIf(h.Unwell)}
	if far.Is6() {
		v.Tunnel6 = 1
	}
	if err := errors.Join(f.locations().Put(h.Key(), h.Number), f.maps.LbBackends.Put(uint32(h.Number), v)); err != nil {
		return fmt.Errorf("backend %s: %w", h.Name, err)
	}
	return nil
}

// dropBackends removes all other backends, and former locations of these.
func (f *DataPath) dropBackends(backends []Backend) error {
	keep, stay := map[locate.Key]bool{}, map[uint32]bool{}
	for _, h := range backends {
		stay[uint32(h.Number)] = true
		keep[h.Key()] = true
	}
	return errors.Join(f.vacateOthers(stay), f.locations().Keep(keep))
}

// vacateOthers vacates all backends outside stay. A backend may have a new number, or another backend its location. No other map
// then names its old number.
func (f *DataPath) vacateOthers(stay map[uint32]bool) error {
	var gone []move.Backend
	var number uint32
	var b bpf.LBLbBackend
	it := f.maps.LbBackends.Iterate()
	for it.Next(&number, &b) {
		if b.Ifindex != 0 && !stay[number] {
			gone = append(gone, move.Backend(number))
		}
	}
	err := it.Err()
	for _, number := range gone {
		err = errors.Join(err, f.vacate(number))
	}
	return err
}

// vacate removes a backend's location. The backend may return, so packets of its flows are dropped until removeBackend.
func (f *DataPath) vacate(number move.Backend) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.addVacant(number)
	return f.maps.LbBackends.Put(uint32(number), bpf.LBLbBackend{})
}

// noteVacant marks flow owners without a location as vacant. An earlier agent removed them, or the partner reported their flows.
// Backends that the agent has yet to locate count as vacant too.
func (f *DataPath) noteVacant(owners map[move.Backend]int) (err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for number := range owners {
		var b bpf.LBLbBackend
		if e := f.maps.LbBackends.Lookup(uint32(number), &b); e != nil {
			err = errors.Join(err, fmt.Errorf("backend %d: %w", number, e))
		} else if b.Ifindex == 0 && b.Unwell != bpf.Removed {
			f.addVacant(number)
		}
	}
	return err
}

// addVacant marks a backend as vacant. The caller holds mu.
func (f *DataPath) addVacant(number move.Backend) {
	if f.vacant == nil {
		f.vacant = map[move.Backend]bool{}
	}
	f.vacant[number] = true
}

// removeBackend lets the data path assign the flows of a vacant backend to others.
func (f *DataPath) removeBackend(number move.Backend) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.maps.LbBackends.Put(uint32(number), bpf.LBLbBackend{Unwell: bpf.Removed}); err != nil {
		return fmt.Errorf("reassign flows of removed backend %d: %w", number, err)
	}
	delete(f.vacant, number)
	return nil
}

func oneIf(yes bool) uint16 {
	if yes {
		return 1
	}
	return 0
}

// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/kernel"
)

const maxRepairs = 4096 // REROUTE_REPAIRS; the first is unused

// installer writes the programs' maps. Repairs are never changed in place, because a program may be using one. New
// repairs are written to free places; then each reference is switched by one store.
type installer struct {
	repairs, paths, prefixes *ebpf.Map
	have                     map[uint32]bpf.ProtectRerouteRepair // referenced now or before
	kept                     map[uint32]bool                     // referenced by the wanted state
}

// install writes the routes to the maps.
func (s *instance) install(routes []route) error {
	i := newInstaller(s.pins)
	oldPaths, oldPrefixes, err := i.read()
	if err != nil {
		return err
	}
	paths, prefixes := map[uint32]bpf.ProtectReroutePath{}, map[bpf.ProtectReroutePrefix]uint32{}
	for _, r := range routes {
		first, err := i.chain(r.ways)
		if err != nil {
			return fmt.Errorf("path %s: %w", r.path.Name, err)
		}
		slot := links.Slot(r.ifindex)
		p := paths[slot]
		p.Ifindex = uint32(r.ifindex)
		if len(r.path.Prefixes) == 0 {
			p.Repair = first
		}
		for _, x := range r.path.Prefixes {
			prefixes[prefixKey(slot, x)] = first
			p.Prefixes++
		}
		paths[slot] = p
	}
	if err := i.putPrefixes(oldPrefixes, prefixes); err != nil {
		return err
	}
	for slot := range oldPaths {
		if _, wanted := paths[slot]; wanted {
			continue
		}
		paths[slot] = bpf.ProtectReroutePath{}
		if err := s.forget(slot); err != nil {
			return err
		}
	}
	for slot, p := range paths {
		if oldPaths[slot] == p {
			continue
		}
		if err := i.paths.Put(slot, p); err != nil {
			return fmt.Errorf("writing a path: %w", err)
		}
	}
	return nil
}

func newInstaller(o *kernel.Opened) *installer {
	return &installer{repairs: o.Maps[pinRepairs], paths: o.Maps[pinPaths], prefixes: o.Maps[pinPrefixes],
		have: map[uint32]bpf.ProtectRerouteRepair{}, kept: map[uint32]bool{}}
}

// readRepairs returns the referenced repairs by number.
func readRepairs(o *kernel.Opened) (map[uint32]bpf.ProtectRerouteRepair, error) {
	i := newInstaller(o)
	_, _, err := i.read()
	return i.have, err
}

// read collects the installed state.
func (i *installer) read() (paths map[uint32]bpf.ProtectReroutePath, prefixes map[bpf.ProtectReroutePrefix]uint32, err error) {
	paths, prefixes = map[uint32]bpf.ProtectReroutePath{}, map[bpf.ProtectReroutePrefix]uint32{}
	var p bpf.ProtectReroutePath
	for slot := range uint32(links.Slots) {
		if err := i.paths.Lookup(slot, &p); err != nil {
			return nil, nil, fmt.Errorf("reading paths: %w", err)
		}
		if p.Ifindex != 0 {
			paths[slot] = p
			if err := i.follow(p.Repair); err != nil {
				return nil, nil, err
			}
		}
	}
	var key bpf.ProtectReroutePrefix
	var id uint32
	for it := i.prefixes.Iterate(); ; {
		if !it.Next(&key, &id) {
			if it.Err() != nil {
				return nil, nil, fmt.Errorf("reading prefixes: %w", it.Err())
			}
			return paths, prefixes, nil
		}
		prefixes[key] = id
		if err := i.follow(id); err != nil {
			return nil, nil, err
		}
	}
}

// follow reads a repair and its successors.
func (i *installer) follow(id uint32) error {
	for id > 0 && id < maxRepairs {
		if _, known := i.have[id]; known {
			return nil
		}
		var r bpf.ProtectRerouteRepair
		if err := i.repairs.Lookup(id, &r); err != nil {
			return fmt.Errorf("reading repair %d: %w", id, err)
		}
		i.have[id] = r
		id = r.Next
	}
	return nil
}

// chain writes the repairs of a path, the last one first. It returns the number of the first.
func (i *installer) chain(ways []way) (id uint32, err error) {
	for n := len(ways) - 1; n >= 0; n-- {
		r := ways[n].ProtectRerouteRepair
		r.Next = id
		if id, err = i.put(r); err != nil {
			return 0, err
		}
	}
	return id, nil
}

// put returns the number of an equal repair, or writes r to a free place, where no packet can use it yet.
func (i *installer) put(r bpf.ProtectRerouteRepair) (uint32, error) {
	for id, h := range i.have {
		if h == r {
			i.kept[id] = true
			return id, nil
		}
	}
	for id := uint32(1); id < maxRepairs; id++ {
		if _, taken := i.have[id]; taken {
			continue
		}
		if err := i.repairs.Put(id, r); err != nil {
			return 0, fmt.Errorf("writing repair %d: %w", id, err)
		}
		i.have[id], i.kept[id] = r, true
		return id, nil
	}
	return 0, fmt.Errorf("no room for another repair: %d are possible, or half of them at one change: apply fewer at a time", maxRepairs-1)
}

func (i *installer) putPrefixes(have, want map[bpf.ProtectReroutePrefix]uint32) error {
	for key, id := range want {
		if have[key] == id {
			continue
		}
		if err := i.prefixes.Put(key, id); err != nil {
			return fmt.Errorf("writing a prefix: %w", err)
		}
	}
	for key := range have {
		if _, wanted := want[key]; wanted {
			continue
		}
		if err := i.prefixes.Delete(key); err != nil {
			return fmt.Errorf("removing a prefix: %w", err)
		}
	}
	return nil
}

// prefixKey returns the lookup key of a destination behind a link.
func prefixKey(slot uint32, p netip.Prefix) bpf.ProtectReroutePrefix {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return bpf.ProtectReroutePrefix{Bits: uint32(32 + bits), Slot: slot, Addr: p.Addr().As16()}
}

// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// State is the protection found in the pins.
type State struct {
	Paths      []PathState          `json:"paths"`
	Unreadable instances.Unreadable `json:"unreadable,omitempty"`

	wholes []scopeSpec
}

// Configured returns the configured paths.
func (st State) Configured() (out []Path) {
	for _, w := range st.wholes {
		for _, p := range w.Paths {
			out = append(out, p.Path)
		}
	}
	return out
}

// PathState is the state of one path.
type PathState struct {
	Name     string         `json:"name"`
	Netns    string         `json:"netns"`
	Device   string         `json:"interface"`
	Prefixes []netip.Prefix `json:"prefixes,omitempty"`
	Gone     bool           `json:"gone,omitempty"`     // the network namespace is gone
	Attached bool           `json:"attached"`           // the program is attached to the interface
	Down     bool           `json:"down"`               // the link may not be used
	Probe    bool           `json:"probe"`              // because liveness rejects it,
	Carrier  bool           `json:"carrier"`            // it has no carrier,
	Drain    bool           `json:"drain"`              // or it is drained
	Unjudged bool           `json:"unjudged,omitempty"` // the link's bfdd session does not exist
	Shadow   bool           `json:"shadow,omitempty"`
	Hold     time.Duration  `json:"hold,omitempty"`
	Repairs  []RepairState  `json:"repairs"`            // in force, best first
	Problems []string       `json:"problems,omitempty"` // why other repairs are not in force
	Dropped  []string       `json:"dropped,omitempty"`  // IP versions without any way left: "IPv4", "IPv6"
	Remedy   string         `json:"remedy,omitempty"`   // against Dropped
	// Unresolved lists gateways over a dead link without a link address. Their packets wait in the kernel.
	Unresolved []netip.Addr `json:"unresolved,omitempty"`
	Routes     RouteState   `json:"routes"`
	Counts     Counts       `json:"counts"`
	// InForce reports whether the path reroutes. Problems may list repairs not in force.
	InForce bool `json:"-"`
}

// RepairState is a repair in the data path.
type RepairState struct {
	Device string     `json:"interface"`
	Via    netip.Addr `json:"via"`
	MTU    int        `json:"mtu"`              // of the way, in bytes
	Fits   int        `json:"fits"`             // longest IPv6 packet it can carry, in bytes
	Learnt bool       `json:"learnt,omitempty"` // a router on the way reported these sizes
	Down   bool       `json:"down"`             // the backup may not be used either
	Silent bool       `json:"silent,omitempty"` // neighbour Via does not answer: packets by this repair are lost
	IPv4   bool       `json:"ipv4"`             // carries IPv4 packets
	IPv6   bool       `json:"ipv6"`             // carries IPv6 packets
}

// Counts counts packets, a GSO train as one. Values never decrease while the path exists.
type Counts struct {
	Packets uint64 `json:"packets"`             // rerouted
	Bytes   uint64 `json:"bytes"`               // of Packets, from the IP header, without added headers
	Fast    uint64 `json:"fast"`                // part of Packets rerouted at ingress
	Next    uint64 `json:"next"`                // part of Packets not by the best repair
	Shadow  uint64 `json:"shadow"`              // would have been rerouted
	Exempt  uint64 `json:"stayed_exempt"`       // kept on the link by their kind
	Shrunk  uint64 `json:"shrunk"`              // TCP trains split into smaller segments
	Big     uint64 `json:"too_big"`             // over the way's MTU: fragmented, or the sender is told
	Lost    uint64 `json:"dropped_too_big"`     // too big even then
	None    uint64 `json:"stayed_no_repair"`    // without a repair for their IP version
	Stuck   uint64 `json:"dropped_no_way_left"` // all backups down too
	Odd     uint64 `json:"dropped_kernel"`      // the kernel could not add a header
}

// ReadState reads protection from its pins.
func ReadState(_ context.Context, r *kernel.Root) (State, error) {
	var st State
	all, unreadable, err := store.All(r)
	st.Unreadable = unreadable
	for _, rec := range all {
		err := st.read(r, rec.Instance)
		if err != nil && !errors.Is(err, kernel.ErrNotExist) { // removed meanwhile
			st.Unreadable.Add(rec.Instance, err)
		}
	}
	return st, err
}

// ReadNamespace is [ReadState] for one network namespace.
func ReadNamespace(r *kernel.Root, ns *netns.Handle) (State, error) {
	var st State
	err := st.read(r, instanceKey(netnsScope(ns)))
	if errors.Is(err, kernel.ErrNotExist) {
		err = nil
	}
	return st, err
}

func (st *State) read(r *kernel.Root, i kernel.Instance) error {
	w, err := readSpec(r, i)
	if err != nil {
		return err
	}
	o, err := r.Open(i, pinRepairs, pinPaths, pinPrefixes, pinCounts, pinLinks, pinDevices)
	if err != nil {
		return err
	}
	defer o.Close()
	if release, ok, err := r.Claim(i); err == nil && ok {
		release()
	} else {
		w.followed = true
	}
	problems, resolved, devices, routesOf, gone := w.check()
	for _, p := range w.Paths {
		s := PathState{Name: p.Name, Netns: w.Netns, Device: p.Device, Prefixes: p.Prefixes, Shadow: p.Shadow, Hold: p.Hold}
		if gone != nil {
			s.Gone, s.Problems = true, []string{gone.Error()}
		}
		for _, x := range problems {
			if x.Path == p.Name {
				s.Problems = append(s.Problems, x.Text)
			}
		}
		if d, ok := devices[p.Device]; ok {
			if err := s.readLink(o, d.index, p, devices); err != nil {
				return err
			}
			w.askRepairs(s.Repairs, devices)
			for i, r := range s.Repairs {
				if r.Silent {
					s.Problems = append(s.Problems, fmt.Sprintf("repair %d by %s: no neighbour answers at %s: packets by this repair are lost", i+1, r.Device, r.Via))
				}
			}
			s.InForce = s.Attached && resolved[p.Name] && slices.ContainsFunc(s.Repairs, func(r RepairState) bool { return r.Device != "" && !(s.Down && r.Silent) }) // "": the device was deleted
			if (s.Carrier || s.Probe) && !s.Shadow && s.InForce {                                                                                                     // a drained link still resolves neighbours
				s.Unresolved = w.unresolvedOf(d.index)
			}
			if len(s.Unresolved) > 0 {
				s.InForce = false
				s.Problems = append(s.Problems, fmt.Sprintf("no link address of %s is known: its packets are lost, not rerouted: run weir serve to reroute them", addresses(s.Unresolved)))
			}
			s.Routes = routesOf(d.index)
			s.Routes.Followed = w.followed
		}
		if s.Counts, err = readCounts(o.Maps[pinCounts], p.Row); err != nil {
			return err
		}
		st.Paths = append(st.Paths, s)
	}
	st.wholes = append(st.wholes, w)
	return nil
}

// check returns the problems and the paths with a resolved repair, if the user may enter the namespace. gone explains
// why the namespace is missing.
func (w scopeSpec) check() (problems []problem, resolved map[string]bool, devices map[string]device, routesOf func(index int) RouteState, gone error) {
	ns, err := netns.Find(w.Netns, w.ID)
	if errors.Is(err, netns.ErrGone) {
		return nil, nil, nil, nil, err
	} else if err != nil {
		return nil, nil, nil, nil, nil
	}
	defer ns.Close()
	var s survey
	var rules map[uint32][]netlink.Rule
	resolved = map[string]bool{}
	_ = ns.Do(func() error { // without permission to enter, configuration and counts remain
		r, err := newResolver()
		if err != nil {
			return err
		}
		for _, route := range r.all(w.Paths) {
			resolved[route.path.Name] = true
		}
		problems, devices = r.problem, r.byName
		if s, err = readRoutes(); err == nil {
			rules, err = keepRules()
		}
		return err
	})
	return problems, resolved, devices, func(index int) RouteState { return s.routeState(index, rules) }, nil
}

// readLink reads a path's state from the programs' maps.
func (s *PathState) readLink(o *kernel.Opened, index int, p published, devices map[string]device) error {
	slot := links.Slot(index)
	pins, err := o.Links()
	if err != nil {
		return err
	}
	var ours uint32
	s.Attached = slices.Contains(pins, linkPin(index)) || o.Maps[pinDevices].Lookup(uint32(index), &ours) == nil
	word, err := readLinkState(o.Maps[pinLinks], slot)
	if err != nil {
		return err
	}
	why := word.Reasons()
	s.Down, s.Probe, s.Carrier, s.Drain = why != 0, why&links.Probe != 0, why&links.Carrier != 0, why&links.Drain != 0
	left := links.WaysLeft{Reasons: why}
	id, err := firstRepair(o, slot, p)
	for err == nil && id != 0 {
		var r bpf.ProtectRerouteRepair
		if err = o.Maps[pinRepairs].Lookup(id, &r); err == nil {
			err = s.add(o, r, devices, &left)
		}
		id = r.Next
	}
	if s.Down && !s.Shadow && err == nil {
		s.Dropped, s.Remedy = left.Dropped(), left.Remedy()
	}
	return err
}

func (s *PathState) add(o *kernel.Opened, r bpf.ProtectRerouteRepair, devices map[string]device, left *links.WaysLeft) error {
	name := ""
	for _, d := range devices {
		if d.index == int(r.Ifindex) {
			name = d.name
		}
	}
	via := netip.AddrFrom16(r.Via)
	if r.Flags&flagVia4 != 0 {
		via = netip.AddrFrom4([4]byte(r.Via[:4]))
	}
	word, err := readLinkState(o.Maps[pinLinks], r.Watch)
	left.Add(r.Flags&flagFor4 != 0, r.Flags&flagFor6 != 0, word.Reasons())
	s.Repairs = append(s.Repairs, RepairState{Device: name, Via: via, MTU: int(r.Mtu), Fits: int(r.Mtu - r.Len6), Learnt: r.Flags&flagLearnt != 0, Down: word.Reasons() != 0,
		IPv4: r.Flags&flagFor4 != 0, IPv6: r.Flags&flagFor6 != 0})
	return err
}

func firstRepair(o *kernel.Opened, slot uint32, p published) (id uint32, err error) {
	if len(p.Prefixes) > 0 {
		err = o.Maps[pinPrefixes].Lookup(prefixKey(slot, p.Prefixes[0]), &id)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			err = nil
		}
		return id, err
	}
	var at bpf.ProtectReroutePath
	err = o.Maps[pinPaths].Lookup(slot, &at)
	return at.Repair, err
}

func readLinkState(m *ebpf.Map, slot uint32) (w links.State, err error) {
	if err := m.Lookup(slot, &w); err != nil {
		return w, fmt.Errorf("reading a link state: %w", err)
	}
	return w, nil
}

func readCounts(m *ebpf.Map, row int) (Counts, error) {
	sum, err := kernel.SumPerCPU[bpf.ProtectRerouteTally](m, uint32(row))
	return Counts{Packets: sum.Packets, Bytes: sum.Bytes, Fast: sum.Fast, Next: sum.Next, Shadow: sum.Shadow, Exempt: sum.Exempt, Shrunk: sum.Shrunk,
		Big: sum.Big, Lost: sum.Lost, None: sum.None, Stuck: sum.Stuck, Odd: sum.Odd}, err
}

// Saved holds the paths of one network namespace for a later restore.
type Saved struct {
	netns.ID
	Paths []Path `json:"paths"`
}

// Saved returns the pinned paths.
func (st State) Saved() (out []Saved) {
	for _, w := range st.wholes {
		s := Saved{ID: w.ID}
		for _, p := range w.Paths {
			s.Paths = append(s.Paths, p.Path)
		}
		out = append(out, s)
	}
	return out
}

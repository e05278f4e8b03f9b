// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/feature/reroute/protect/srv6"
	"github.com/weir-project/weir/internal/dump"
)

// Flags of a repair, as in protect.h. Only user space knows flagLearnt: a router on the way reported the size.
const (
	flagShadow = 1 << iota
	flagInline
	flagFor4
	flagFor6
	flagVia4
	flagMACs
	flagLearnt
)

// way is a repair resolved in the current network namespace. Its struct lacks the number of the next repair.
type way struct {
	bpf.ProtectRerouteRepair
	device string
	via    netip.Addr
	source netip.Addr
	mac    net.HardwareAddr // of the backup
}

// route is a path resolved in the current network namespace.
type route struct {
	path    *published
	ifindex int
	ways    []way
}

// device is an interface used by a path.
type device struct {
	index, mtu int
	name       string
	mac        net.HardwareAddr
}

// resolver resolves a configuration in the calling thread's network namespace.
type resolver struct {
	byName  map[string]device
	bySlot  map[uint32]device // devices in use
	problem []problem
}

// problem explains why a path or one of its repairs is not in force.
type problem struct {
	Path string `json:"path"`
	Text string `json:"text"`
}

func newResolver() (*resolver, error) {
	all, err := dump.LinkList()
	if err != nil {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	r := &resolver{byName: map[string]device{}, bySlot: map[uint32]device{}}
	for _, l := range all {
		a := l.Attrs()
		d := device{index: a.Index, mtu: a.MTU, name: a.Name, mac: a.HardwareAddr}
		if a.EncapType != "ether" {
			d.mtu = 0
		}
		r.byName[a.Name] = d
	}
	return r, nil
}

// all resolves every path. Failures become problems, and the other paths are unaffected.
func (r *resolver) all(paths []published) (out []route) {
	for i := range paths {
		p := &paths[i]
		d, err := r.use(p.Device)
		if err != nil {
			r.note(p, err)
			continue
		}
		t := route{path: p, ifindex: d.index}
		for n, rep := range p.Repairs {
			w, err := r.way(p, rep, d)
			if err != nil {
				r.note(p, fmt.Errorf("repair %d: %w", n+1, err))
				continue
			}
			t.ways = append(t.ways, w)
		}
		if len(t.ways) > 0 {
			out = append(out, t)
		}
	}
	return out
}

func (r *resolver) note(p *published, err error) {
	r.problem = append(r.problem, problem{Path: p.Name, Text: err.Error()})
}

// use returns an interface and occupies its slot of the link states.
func (r *resolver) use(name string) (device, error) {
	d, ok := r.byName[name]
	switch {
	case !ok:
		return d, fmt.Errorf("there is no interface %s: nothing is rerouted until it exists", name)
	case d.mtu == 0:
		return d, fmt.Errorf("interface %s: its packets have no Ethernet header: protect the interface below it", name)
	}
	slot := links.Slot(d.index)
	if o, taken := r.bySlot[slot]; taken && o.index != d.index {
		return d, fmt.Errorf("interfaces %s and %s have indexes (%d and %d) with the same remainder modulo %d: make one of them again", o.name, name, o.index, d.index, links.Slots)
	}
	r.bySlot[slot] = d
	return d, nil
}

// way resolves the backup of a repair and builds its headers.
func (r *resolver) way(p *published, rep Repair, protected device) (w way, err error) {
	w.device, w.via, w.source = rep.Device, rep.Via, rep.Source
	if len(rep.Segments) > 0 && (w.device == "" || !w.via.IsValid() || !w.source.IsValid()) {
		if err := r.ask(&w, rep.Segments[0], protected); err != nil {
			return w, err
		}
	}
	backup, err := r.use(w.device)
	if err != nil {
		return w, err
	}
	switch {
	case backup.index != protected.index:
	case len(rep.Segments) == 0:
		return w, fmt.Errorf("interface %s is the protected link", p.Device)
	default:
		return w, fmt.Errorf("segment %s is reached over the protected link %s: say interface and via", rep.Segments[0], p.Device)
	}
	w.Ifindex, w.Slot, w.Watch = uint32(backup.index), links.Slot(protected.index), links.Slot(backup.index)
	w.Row, w.Mtu = uint32(p.Row), uint32(backup.mtu)
	if rep.MTU > 0 {
		w.Mtu = min(w.Mtu, uint32(rep.MTU))
	}
	if p.Shadow {
		w.Flags |= flagShadow
	}
	w.mac = backup.mac
	copy(w.Via[:], w.via.AsSlice())
	w.headers(rep)
	return w, nil
}

// headers builds the outer headers.
func (w *way) headers(rep Repair) {
	if len(rep.Segments) == 0 {
		if w.via.Is4() {
			w.Flags |= flagVia4 | flagFor4
		} else {
			w.Flags |= flagFor4 | flagFor6
		}
		return
	}
	w.Flags |= flagFor6
	length := 0
	if w.Header6, length = srv6.Encap(w.source, rep.Segments, srv6.NextIPv6); rep.Mode == Inline {
		w.Header6, length = srv6.Inline(rep.Segments)
		w.Flags |= flagInline
	}
	w.Len6 = uint32(length)
	if rep.carries4() {
		w.Flags |= flagFor4
		w.Header4, length = srv6.Encap(w.source, rep.Segments4, srv6.NextIPv4)
		w.Len4 = uint32(length)
	}
}

// stranded4 reports whether a path's interface carries IPv4 packets although no repair can.
func (r *resolver) stranded4(p Path) bool {
	if slices.ContainsFunc(p.Repairs, Repair.carries4) {
		return false
	}
	if len(p.Prefixes) > 0 {
		return slices.ContainsFunc(p.Prefixes, func(x netip.Prefix) bool { return x.Addr().Is4() })
	}
	d, ok := r.byName[p.Device]
	if !ok {
		return false // the interface has no routes yet
	}
	routes, err := dump.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{LinkIndex: d.index}, netlink.RT_FILTER_OIF)
	return err == nil && len(routes) > 0
}

// ask completes a way from the routing table.
func (r *resolver) ask(w *way, first netip.Addr, protected device) error {
	o := &netlink.RouteGetOptions{}
	if w.device != "" {
		d, ok := r.byName[w.device]
		if !ok {
			return fmt.Errorf("there is no interface %s: nothing is rerouted there until it exists", w.device)
		}
		o.OifIndex = d.index
	}
	found, err := netlink.RouteGetWithOptions(first.AsSlice(), o)
	if err != nil || len(found) == 0 {
		if w.device != "" && w.via.IsValid() {
			return r.askSource(w) // the operator is responsible for the route
		}
		return fmt.Errorf("there is no route to segment %s (%w): say interface and via", first, cmp.Or[error](err, unix.ENETUNREACH))
	}
	f := found[0]
	if w.device == "" {
		for _, d := range r.byName {
			if d.index == f.LinkIndex {
				w.device = d.name
			}
		}
		if f.LinkIndex == protected.index {
			return fmt.Errorf("segment %s is reached over the protected link %s: say interface and via", first, protected.name)
		}
	}
	if !w.via.IsValid() {
		w.via = first // the segment is on the link
		if f.Gw != nil {
			w.via, _ = netip.AddrFromSlice(f.Gw)
		}
	}
	if s, ok := netip.AddrFromSlice(f.Src); ok && !w.source.IsValid() && usable(s) {
		w.source = s
	}
	return r.askSource(w)
}

// askSource picks a source for outer headers. It prefers the loopback interface, the usual place of a router's
// addresses, to the backup.
func (r *resolver) askSource(w *way) error {
	for _, name := range []string{"lo", w.device} {
		l, err := netlink.LinkByName(name)
		if w.source.IsValid() || err != nil {
			continue
		}
		all, err := dump.AddrList(l, netlink.FAMILY_V6)
		if err != nil {
			return fmt.Errorf("listing addresses of %s: %w", name, err)
		}
		for _, a := range all {
			if s, ok := netip.AddrFromSlice(a.IP); ok && usable(s) && !w.source.IsValid() {
				w.source = s
			}
		}
	}
	if !w.source.IsValid() {
		return fmt.Errorf("this host has no global IPv6 address for outer headers: say source")
	}
	return nil
}

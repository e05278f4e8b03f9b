// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/protect/neigh"
	"github.com/weir-project/weir/internal/netns"
)

// The kernel queues packets of a neighbour until it knows its link address, and drops them if the neighbour does not
// answer. These packets never reach the egress program. So [Run] gives such neighbours a stand-in address while their
// link is down. It asks for them until they answer or the link is used again.

// isUnresolved reports whether the kernel has no link address for a neighbour. n is its entry, or nil.
func isUnresolved(n *netlink.Neigh) bool {
	return n == nil || n.State&(neigh.Known|netlink.NUD_NOARP) == 0
}

func isStandIn(n *netlink.Neigh) bool { return n != nil && neigh.IsStandIn(n.HardwareAddr) }

// unused reports whether an interface is a protected link out of use.
func (w *watcher) unused(index uint32) bool {
	l := w.links[int(index)]
	return l != nil && l.protected && w.words.Get(l.slot).Reasons() != 0
}

// standIns sets stand-ins for neighbours of unusable links and removes all others.
func (w *watcher) standIns(now time.Time) error {
	if now.Sub(w.stood) < pollInterval {
		return nil
	}
	w.stood = now
	return w.ns.Do(func() error {
		for k := range w.unresolved {
			if w.ears == nil || !w.unused(k.Ifindex) { // without a receiver, answers would be missed
				continue
			}
			n, err := neigh.Find(k)
			if err != nil {
				return err
			}
			switch {
			case isStandIn(n) && n.State&netlink.NUD_REACHABLE != 0:
			case isUnresolved(n) || isStandIn(n):
				if err := neigh.PutStandIn(k); err != nil {
					return err
				}
			default:
				continue // the kernel has resolved it
			}
			w.standing = true
			if w.kept[k] == nil {
				w.kept[k] = &keptNeighbour{mac: neigh.StandIn(), times: askOnly}
			}
		}
		return w.dropStandIns(nil)
	})
}

// dropStandIns removes the stand-ins of usable links, and of the link more (may be nil). It runs in the namespace.
func (w *watcher) dropStandIns(more *watched) error {
	if !w.standing {
		return nil
	}
	w.standing = false
	err := neigh.DropStandIns(func(k neigh.Key) bool {
		stays := w.unused(k.Ifindex) && w.links[int(k.Ifindex)] != more
		w.standing = w.standing || stays
		return stays
	})
	for k, n := range w.kept {
		if n.stands() && (!w.unused(k.Ifindex) || w.links[int(k.Ifindex)] == more) {
			delete(w.kept, k)
		}
	}
	return err
}

// stands reports whether the neighbour's entry is a stand-in.
func (n *keptNeighbour) stands() bool { return neigh.IsStandIn(n.mac) }

// dropStandIns removes all stand-ins except for wanted neighbours on unusable links.
func (s *instance) dropStandIns(want map[neigh.Key]bool) error {
	var bad error
	err := neigh.DropStandIns(func(k neigh.Key) bool {
		if !want[k] {
			return false
		}
		word, err := readLinkState(s.pins.Maps[pinLinks], links.Slot(int(k.Ifindex)))
		if err != nil {
			bad = err
		}
		return word.Reasons() != 0
	})
	if bad != nil {
		return bad
	}
	return err
}

// unresolvedOf returns the gateways of routes over a dead interface without a link address. Their packets wait in the
// kernel and are not rerouted.
func (w scopeSpec) unresolvedOf(index int) (out []netip.Addr) {
	ns, err := netns.Find(w.Netns, w.ID)
	if err != nil {
		return nil
	}
	defer ns.Close()
	_ = ns.Do(func() error { // without permission to enter, the result is empty
		want, err := neighbours([]route{{ifindex: index}})
		for k := range want {
			if n, err := neigh.Find(k); err == nil && isUnresolved(n) {
				out = append(out, k.Addr())
			}
		}
		return err
	})
	return out
}

// askRepairs marks repairs with a silent neighbour. A neighbour is silent if the kernel has given up, or if weir
// serve has asked without success. Any other may only be slow. Without permission to enter the namespace, nothing is
// marked.
func (w scopeSpec) askRepairs(repairs []RepairState, devices map[string]device) {
	ns, err := netns.Find(w.Netns, w.ID)
	if err != nil {
		return
	}
	defer ns.Close()
	_ = ns.Do(func() error {
		for i := range repairs {
			r := &repairs[i]
			d, ok := devices[r.Device]
			if !ok || r.Down || !asksNeighbours(r.Device) {
				continue
			}
			n, err := neigh.Find(neigh.NewKey(d.index, r.Via))
			r.Silent = err == nil && isUnresolved(n) && (w.followed || n != nil && n.State&netlink.NUD_FAILED != 0)
		}
		return nil
	})
}

// asksNeighbours reports whether an interface has a carrier and resolves link addresses.
func asksNeighbours(device string) bool {
	l, err := netlink.LinkByName(device)
	return err == nil && l.Attrs().RawFlags&unix.IFF_NOARP == 0 && l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0
}

func addresses(all []netip.Addr) string {
	var out []string
	for _, a := range all {
		out = append(out, a.String())
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

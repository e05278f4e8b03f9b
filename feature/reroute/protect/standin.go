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

// The kernel keeps a packet at its neighbour's entry until it knows a link address, and drops it if the neighbour does not answer.
// Such packets do not come to the egress program. So [Run] gives neighbours without a link address a stand-in while their link may
// not be used, and asks for them until they answer or the link is used again.

// isUnresolved says that the kernel has nowhere to send packets for a neighbour; n is its entry, or nil.
func isUnresolved(n *netlink.Neigh) bool {
	return n == nil || n.State&(neigh.Known|netlink.NUD_NOARP) == 0
}

func isStandIn(n *netlink.Neigh) bool { return n != nil && neigh.IsStandIn(n.HardwareAddr) }

// unused says that a protected link of an interface may not be used.
func (w *watcher) unused(index uint32) bool {
	l := w.links[int(index)]
	return l != nil && l.protected && w.words.Get(l.slot).Reasons() != 0
}

// standIns puts stand-ins for neighbours of links that may not be used, and removes those of all other links.
func (w *watcher) standIns(now time.Time) error {
	if now.Sub(w.stood) < pollInterval {
		return nil
	}
	w.stood = now
	return w.ns.Do(func() error {
		for k := range w.unresolved {
			if w.ears == nil || !w.unused(k.Ifindex) { // without ears nobody would hear the neighbour
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
				continue // the kernel has found it
			}
			w.standing = true
			if w.kept[k] == nil {
				w.kept[k] = &keptNeighbour{mac: neigh.StandIn(), times: askOnly}
			}
		}
		return w.dropStandIns(nil)
	})
}

// dropStandIns removes stand-ins of links that are used, and of one more, which may be nil. It runs in the namespace.
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

// stands says that the neighbour's entry is a stand-in.
func (n *keptNeighbour) stands() bool { return neigh.IsStandIn(n.mac) }

// dropStandIns removes stand-ins but those of neighbours that are wanted on links that may not be used.
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

// unresolvedOf are the gateways of routes over a dead interface whose packets wait in the kernel, and so are not rerouted.
func (w scopeSpec) unresolvedOf(index int) (out []netip.Addr) {
	ns, err := netns.Find(w.Netns, w.ID)
	if err != nil {
		return nil
	}
	defer ns.Close()
	_ = ns.Do(func() error { // who may not enter sees the rest
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

// askRepairs notes which neighbours of repairs do not answer: the kernel has given up, or weir serve asks each second and has no link
// address yet. Before that they may only be slow. Who may not enter the namespace notes none.
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

// asksNeighbours says that an interface has a carrier, and finds link addresses by asking.
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

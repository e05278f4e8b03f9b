// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Explain implements feature.Explainer. It returns the output link of a packet forwarded over a protected link.
func (Feature) Explain(_ context.Context, r *kernel.Root, p feature.Packet) ([]feature.Verdict, error) {
	ns, err := p.OpenNetns()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	if v := bfdVerdict(r, ns, p); v != nil {
		return []feature.Verdict{*v}, nil
	}
	st, err := protect.ReadNamespace(r, ns)
	if err != nil {
		return []feature.Verdict{{Stage: feature.StageTC, ExplainStep: feature.ExplainStep{Step: Name, Text: "cannot be read: " + err.Error(), Warning: true}}}, nil
	}
	if len(st.Paths) == 0 {
		return nil, nil
	}
	device, via := leavesBy(ns, p)
	path := pathOf(st.Paths, device, p.To.Addr())
	if path == nil {
		return nil, nil
	}
	return []feature.Verdict{verdict(*path, p.To.Addr(), via)}, nil
}

// bfdPort is the port of control packets: RFC 5881 section 4.
const bfdPort = 3784

// bfdVerdict returns the verdict of the BFD session consuming a packet, or nil.
func bfdVerdict(r *kernel.Root, ns *netns.Handle, p feature.Packet) *feature.Verdict {
	if p.Proto != "udp" || p.To.Port() != bfdPort {
		return nil
	}
	st, err := peers.ReadState(r)
	if err != nil {
		return nil // status reports the reason
	}
	for _, s := range st.Sessions {
		if s.Peer.WithZone("") != p.From.Addr() || s.Problem != "" || p.Interface != "" && p.Interface != s.Device {
			continue
		}
		if at, err := netns.Open(s.Netns); err == nil {
			here := at.Inode() == ns.Inode()
			at.Close()
			if here {
				return &feature.Verdict{Stage: feature.StageTC, ExplainStep: feature.ExplainStep{Step: "reroute BFD " + s.Name, Text: fmt.Sprintf("the session receives control packets of %s without a socket", s.Peer)},
					Result: "received by BFD session " + s.Name}
			}
		}
	}
	return nil
}

// leavesBy returns the interface and the gateway of a packet's route; "": the host does not forward it. This host's
// own packets have no input interface. With one, the kernel takes IPv4 packets from this host as forged.
func leavesBy(ns *netns.Handle, p feature.Packet) (device string, via netip.Addr) {
	_ = ns.Do(func() error { // without a route, package host explains the reason
		o := &netlink.RouteGetOptions{}
		if l, err := netlink.LinkByName(p.Interface); err == nil {
			o.SrcAddr = p.From.Addr().AsSlice()
			if own, err := netlink.RouteGet(o.SrcAddr); err != nil || len(own) == 0 || own[0].Type != unix.RTN_LOCAL {
				o.IifIndex = l.Attrs().Index
			}
		}
		found, err := netlink.RouteGetWithOptions(p.To.Addr().AsSlice(), o)
		if err != nil || len(found) == 0 || found[0].Type != unix.RTN_UNICAST {
			return err
		}
		via, _ = netip.AddrFromSlice(found[0].Gw)
		if v, ok := found[0].Via.(*netlink.Via); ok && !via.IsValid() {
			via, _ = netip.AddrFromSlice(v.Addr)
		}
		l, err := netlink.LinkByIndex(found[0].LinkIndex)
		if err == nil {
			device = l.Attrs().Name
		}
		return err
	})
	return device, via.Unmap()
}

// pathOf returns the path of a link with the longest prefix for an address, or nil.
func pathOf(paths []protect.PathState, device string, to netip.Addr) (found *protect.PathState) {
	bits := -2
	for i := range paths {
		p := &paths[i]
		if p.Device != device || len(p.Repairs) == 0 {
			continue // the data path does not know a path without a repair in force
		}
		if len(p.Prefixes) == 0 && bits < -1 {
			found, bits = p, -1
		}
		for _, x := range p.Prefixes {
			if x.Contains(to) && x.Bits() > bits {
				found, bits = p, x.Bits()
			}
		}
	}
	return found
}

// verdict explains the output link of a path's packet. via is the gateway of its route.
func verdict(p protect.PathState, to, via netip.Addr) feature.Verdict {
	v := feature.Verdict{Stage: feature.StageForward, ExplainStep: feature.ExplainStep{Step: "reroute path " + p.Name}}
	version, suits := "IPv6", func(r protect.RepairState) bool { return r.IPv6 }
	if to.Is4() {
		version, suits = "IPv4", func(r protect.RepairState) bool { return r.IPv4 }
	}
	i := slices.IndexFunc(p.Repairs, func(r protect.RepairState) bool { return suits(r) && !r.Down })
	link := fmt.Sprintf("link %s may not be used (%s)", p.Device, strings.Join(whyDown(p), ", "))
	switch {
	case !p.Attached:
		v.Text, v.Warning = fmt.Sprintf("weir's program is not attached to %s: the packet takes the link even if it is down", p.Device), true
	case !p.Down:
		v.Text = fmt.Sprintf("link %s is used", p.Device)
	case slices.Contains(p.Unresolved, via):
		v.Text, v.Warning = fmt.Sprintf("%s, and no link address of %s is known: the packet waits in the kernel and is not rerouted: run weir serve", link, via), true
		v.Result = fmt.Sprintf("dropped: the gateway %s does not answer", via)
	case slices.Contains(p.Dropped, version):
		v.Text, v.Warning = fmt.Sprintf("%s, and no way is left for %s packets: %s", link, version, p.Remedy), true
		v.Result = fmt.Sprintf("dropped: path %s has no way left", p.Name)
	case i < 0:
		lack := "no repair is for %s packets"
		if slices.ContainsFunc(p.Repairs, suits) { // only in shadow mode, as it drops nothing
			lack = "no repair for %s packets may be used"
		}
		v.Text, v.Warning = fmt.Sprintf("%s, and "+lack+": they stay on it", link, version), true
	case p.Shadow:
		v.Text = fmt.Sprintf("%s; the packet would be rerouted by %s to %s, but the path is a shadow: it stays on the link", link, p.Repairs[i].Device, p.Repairs[i].Via)
	case p.Repairs[i].Silent:
		v.Text, v.Warning = fmt.Sprintf("%s: the packet is rerouted by %s to %s, where no neighbour answers", link, p.Repairs[i].Device, p.Repairs[i].Via), true
		v.Result = fmt.Sprintf("dropped: the neighbour %s does not answer", p.Repairs[i].Via)
	default:
		v.Text = fmt.Sprintf("%s: the packet is rerouted by %s to %s", link, p.Repairs[i].Device, p.Repairs[i].Via)
		v.Result = fmt.Sprintf("forwarded to %s, rerouted by %s to %s", to, p.Repairs[i].Device, p.Repairs[i].Via)
	}
	return v
}

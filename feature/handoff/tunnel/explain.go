// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
)

// Explain explains a packet arriving at a backend's tunnel device: its load balancer, and whether
// the answer takes the same tunnel back.
func Explain(p feature.Packet) (out []feature.Verdict, err error) {
	if p.Interface == "" {
		return nil, nil
	}
	ns, err := p.OpenNetns()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	err = ns.Do(func() error {
		l, err := netlink.LinkByName(p.Interface)
		if err != nil {
			return nil //nolint:nilerr // the interface has just been deleted
		}
		v, ok := l.(*netlink.Vxlan)
		if !ok || v.VxlanId != VNI || v.FlowBased {
			return nil
		}
		out = append(out, backEnd(v, p))
		return nil
	})
	return out, err
}

// backEnd explains a backend's end of the tunnel. The caller is in the network namespace.
func backEnd(v *netlink.Vxlan, p feature.Packet) feature.Verdict {
	s := feature.Verdict{Stage: feature.StageTC, Order: -1, ExplainStep: feature.ExplainStep{Step: "tunnel",
		Text: fmt.Sprintf("%s is the tunnel from the load balancer at %s", v.Name, v.Group)}}
	to := p.To.Addr()
	routes, err := netlink.RouteGetWithOptions(p.From.Addr().AsSlice(), &netlink.RouteGetOptions{SrcAddr: to.AsSlice()})
	if err != nil || len(routes) == 0 {
		s.Text, s.Warning = s.Text+fmt.Sprintf("; there is no route for an answer from %s to %s: is %s an address of this backend?", to, p.From.Addr(), to), true
		return s
	}
	if back := routes[0].LinkIndex; back != v.Index {
		name := fmt.Sprint("interface ", back)
		if i, err := net.InterfaceByIndex(back); err == nil {
			name = i.Name
		}
		s.Text, s.Warning = s.Text+fmt.Sprintf("; the answer leaves by %s, not by the tunnel: ip rule add from %s lookup %d", name, to, VNI), true
	}
	return s
}

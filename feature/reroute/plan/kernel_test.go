// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// routers is a network of namespaces with static routes of a topology and SRv6 functions. It does not converge.
type routers struct {
	t  *testing.T
	n  *topo.Network
	p  *plan.Planner
	ns []*netns.Handle

	end ending
}

func device(link int) string { return fmt.Sprintf("l%d", link) }

// address returns the address of a link's near end; loopback the address of a router's host.
func address(n *topo.Network, link int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("fd00:%x::%x", 1+min(link, n.Links[link].Reverse), 1+link%2))
}

func loopback(node int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("2001:db8:%x::1", node)) }

func host(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(128, 128)}
}

// Possible ends of segment lists.
type ending string

const (
	dt6    ending = "End.DT6"
	dx6    ending = "End.DX6"
	inline ending = "the destination itself"
)

// newRouters gives every router and adjacency a SID, and connects the cables.
func newRouters(t *testing.T, n *topo.Network, end ending) *routers {
	t.Helper()
	for i := range n.Nodes {
		n.Nodes[i].End = netip.MustParseAddr(fmt.Sprintf("fc00:%x::1", i))
		n.Nodes[i].DT6 = netip.MustParseAddr(fmt.Sprintf("fc00:%x::d6", i))
	}
	for i, l := range n.Links {
		n.Links[i].EndX = netip.MustParseAddr(fmt.Sprintf("fc00:%x::e:%x", l.From, i))
		if end == dx6 {
			n.Links[i].DX6 = netip.MustParseAddr(fmt.Sprintf("fc00:%x::d:%x", l.From, i))
		}
	}
	r := &routers{t: t, n: n, p: plan.New(n), end: end}
	for i := range n.Nodes {
		r.ns = append(r.ns, nstest.NewNetns(t))
		nstest.Address(t, r.ns[i], "lo", netip.PrefixFrom(loopback(i), 128))
	}
	for i, l := range n.Links {
		if i < l.Reverse {
			nstest.Cable(t, r.ns[l.From], device(i), r.ns[l.To], device(l.Reverse))
			for _, side := range []int{i, l.Reverse} {
				nstest.Address(t, r.ns[n.Links[side].From], device(side), netip.PrefixFrom(address(n, side), 64))
			}
		}
	}
	for i := range n.Nodes {
		r.in(i, func() error { return r.furnish(i) })
	}
	return r
}

func (r *routers) in(node int, f func() error) {
	r.t.Helper()
	if err := r.ns[node].Do(f); err != nil {
		r.t.Fatalf("%s: %v", r.n.Nodes[node].Name, err)
	}
}

// furnish sets a router's routes to all others by every shortest path, and its SIDs.
func (r *routers) furnish(node int) error {
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0); err != nil {
		return err
	}
	enabled, err := os.ReadDir("/proc/sys/net/ipv6/conf")
	if err != nil {
		return err
	}
	for _, d := range enabled {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+d.Name()+"/seg6_enabled", []byte("1"), 0); err != nil {
			return err
		}
	}
	for d := range r.n.Nodes {
		var hops []*netlink.NexthopInfo
		for i, l := range r.n.Links {
			if l.From != node {
				continue
			}
			if d != node && uint64(l.Metric)+r.p.Distance(l.To, d) == r.p.Distance(node, d) {
				index, err := ifindex(i)
				if err != nil {
					return err
				}
				hops = append(hops, &netlink.NexthopInfo{LinkIndex: index, Gw: address(r.n, l.Reverse).AsSlice()})
			}
		}
		if d == node {
			continue
		}
		locator := &net.IPNet{IP: netip.MustParseAddr(fmt.Sprintf("fc00:%x::", d)).AsSlice(), Mask: net.CIDRMask(32, 128)}
		for _, dst := range []*net.IPNet{locator, host(loopback(d))} {
			for _, table := range []int{254, decapTable} {
				if err := netlink.RouteAdd(&netlink.Route{Dst: dst, MultiPath: hops, Table: table}); err != nil {
					return fmt.Errorf("route to %s: %w", dst, err)
				}
			}
		}
	}
	return r.functions(node)
}

// decapTable is End.DT6's table. The main table lacks the router's own addresses, which are in the table local, so
// packets for them would circle through lo.
const decapTable = 100

func ifindex(link int) (int, error) {
	l, err := netlink.LinkByName(device(link))
	if err != nil {
		return 0, err
	}
	return l.Attrs().Index, nil
}

// functions installs a router's SIDs on a device no failure takes down, because their routes would go with it.
func (r *routers) functions(node int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "sids"
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "sids-peer"}); err != nil {
		return err
	}
	for _, name := range []string{"sids", "sids-peer"} {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(l); err != nil {
			return err
		}
	}
	holder, err := netlink.LinkByName("sids")
	if err != nil {
		return err
	}
	index := holder.Attrs().Index
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	own := &netlink.Route{Dst: host(loopback(node)), LinkIndex: lo.Attrs().Index, Table: decapTable, Type: unix.RTN_LOCAL}
	if err := netlink.RouteAdd(own); err != nil {
		return fmt.Errorf("own address: %w", err)
	}
	add := func(sid netip.Addr, e *netlink.SEG6LocalEncap) error {
		e.Flags[nl.SEG6_LOCAL_ACTION] = true
		return netlink.RouteAdd(&netlink.Route{Dst: host(sid), LinkIndex: index, Encap: e})
	}
	x := r.n.Nodes[node]
	if err := add(x.End, &netlink.SEG6LocalEncap{Action: nl.SEG6_LOCAL_ACTION_END}); err != nil {
		return fmt.Errorf("End: %w", err)
	}
	dt6 := &netlink.SEG6LocalEncap{Action: nl.SEG6_LOCAL_ACTION_END_DT6, Table: decapTable}
	dt6.Flags[nl.SEG6_LOCAL_TABLE] = true
	if err := add(x.DT6, dt6); err != nil {
		return fmt.Errorf("End.DT6: %w", err)
	}
	for i, l := range r.n.Links {
		if l.From != node {
			continue
		}
		for sid, action := range map[netip.Addr]int{l.EndX: nl.SEG6_LOCAL_ACTION_END_X, l.DX6: nl.SEG6_LOCAL_ACTION_END_DX6} {
			if !sid.IsValid() {
				continue
			}
			e := &netlink.SEG6LocalEncap{Action: action, In6Addr: address(r.n, r.n.Links[i].Reverse).AsSlice()}
			e.Flags[nl.SEG6_LOCAL_NH6] = true
			if err := add(sid, e); err != nil {
				return fmt.Errorf("SID %s: %w", sid, err)
			}
		}
	}
	return nil
}

// repair replaces the route to a destination by a repair.
func (r *routers) repair(node int, x plan.Repair) error {
	sids, err := x.SIDs(r.n)
	mode := nl.SEG6_IPTUN_MODE_ENCAP
	if r.end == inline {
		sids, err = x.InlineSIDs(r.n)
		mode = nl.SEG6_IPTUN_MODE_INLINE
	}
	if err != nil {
		return err
	}
	index, err := ifindex(x.Out)
	if err != nil {
		return err
	}
	route := &netlink.Route{Dst: host(loopback(x.Destination)), LinkIndex: index, Gw: address(r.n, r.n.Links[x.Out].Reverse).AsSlice(),
		Src: loopback(node).AsSlice()}
	if len(sids) > 0 {
		e := &netlink.SEG6Encap{Mode: mode}
		if r.end == inline {
			e.Segments = append(e.Segments, netip.IPv6Unspecified().AsSlice()) // for the packet's destination
		}
		for _, s := range slices.Backward(sids) { // the header has the last segment first (RFC 8754 section 2)
			e.Segments = append(e.Segments, s.AsSlice())
		}
		route.Encap = e
		// The kernel looks up the outer destination again, regardless of the route's next hop. A route to the first
		// SID forces the first hop. (weir's own data path redirects packets and needs none.)
		first := &netlink.Route{Dst: host(sids[0]), LinkIndex: index, Gw: route.Gw}
		if err := netlink.RouteReplace(first); err != nil {
			return err
		}
	}
	return netlink.RouteReplace(route)
}

// cut takes both ends of cables down.
func (r *routers) cut(links []int) {
	for _, i := range links {
		r.in(r.n.Links[i].From, func() error {
			l, err := netlink.LinkByName(device(i))
			if err != nil {
				return err
			}
			return netlink.LinkSetDown(l)
		})
	}
}

// Planned lists take real packets through real kernels: to every destination of a router, with each of its links down
// and no other router informed.
func TestKernelForwards(t *testing.T) {
	nstest.NeedRoot(t)
	ring := strings.NewReplacer("metric: 9}", "metric: 9}\n  - {from: d, to: e, metric: 9}").Replace(square)
	long := `nodes: [{name: s}, {name: p}, {name: q}, {name: r}, {name: f}, {name: u}]
links:
  - {from: s, to: p, metric: 10}
  - {from: p, to: q, metric: 40}
  - {from: q, to: r, metric: 40}
  - {from: r, to: u, metric: 40}
  - {from: u, to: f, metric: 1}
  - {from: s, to: f, metric: 1}
  - {from: p, to: f, metric: 1}
  - {from: q, to: f, metric: 1}
  - {from: r, to: f, metric: 1}
`
	for _, c := range []struct {
		text, node string
		mode       plan.Mode
		end        ending
		longest    int
	}{
		{ring, "a", plan.Link, dt6, 1}, {ring, "a", plan.Link, dx6, 1}, {ring, "a", plan.Link, inline, 1},
		{long, "s", plan.Node, dt6, 3}, {long, "s", plan.Node, dx6, 3}, {long, "s", plan.Node, inline, 3},
	} {
		t.Run(fmt.Sprintf("%s ends with %s", c.mode, c.end), func(t *testing.T) {
			longest := 0
			for i, more := 0, true; more; i++ {
				r := newRouters(t, read(t, c.text), c.end) // new routers, because a link down loses its routes
				node := r.n.Node(c.node)
				p, err := r.p.Plan(node, plan.Options{Mode: c.mode})
				if err != nil {
					t.Fatal(err)
				}
				var repairs []plan.Repair
				for _, x := range p.Repairs {
					if x.Failure == i {
						repairs = append(repairs, x)
						longest = max(longest, len(x.Segments))
					}
				}
				r.check(node, p.Failures[i], repairs)
				more = i+1 < len(p.Failures)
			}
			if longest != c.longest {
				t.Errorf("the longest list has %d segments: the test wants %d", longest, c.longest)
			}
		})
	}
}

// check tests the repairs of one failure. It first waits until packets reach all destinations without it, because
// devices need time to come up.
func (r *routers) check(node int, f plan.Failure, repairs []plan.Repair) {
	r.t.Helper()
	var from, to []*net.UDPConn
	for _, x := range repairs {
		from = append(from, nstest.ListenUDP(r.t, r.ns[node], netip.AddrPortFrom(loopback(node), 0)))
		to = append(to, nstest.ListenUDP(r.t, r.ns[x.Destination], netip.AddrPortFrom(loopback(x.Destination), 0)))
	}
	for end := time.Now().Add(60 * time.Second); slices.Contains(nstest.Arrive(r.t, from, to), false); {
		if time.Now().After(end) {
			r.t.Fatal("before any failure, not everything arrives")
		}
	}
	r.cut(f.Links)
	for _, x := range repairs {
		r.in(node, func() error { return r.repair(node, x) })
	}
	wanted := slices.Repeat([]bool{true}, len(repairs))
	for i, ok := range nstest.ArriveAt(r.t, from, to, wanted) {
		if !ok {
			sids, _ := repairs[i].SIDs(r.n)
			r.t.Errorf("%s without %s: nothing arrives by %v (%s)", r.n.Nodes[repairs[i].Destination].Name, f.Name(r.n), sids, plan.ListName(r.n, repairs[i].Segments))
		}
	}
	for _, c := range append(from, to...) {
		c.Close()
	}
}

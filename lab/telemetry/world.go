// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"fmt"
	"net/netip"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// The addresses of the lab. Collectors share one address of each family, as behind one name in a router's
// configuration; each simulated router has its own.
var (
	service4 = netip.MustParseAddr("10.98.0.1")
	service6 = netip.MustParseAddr("fd00:98::1")
	devices4 = netip.MustParsePrefix("10.99.0.0/16")
	devices6 = netip.MustParsePrefix("fd00:99::/64")
)

// port is the one port of every collector, for UDP and TCP.
const port = 9991

// site is a network namespace and its name.
type site struct {
	*netns.Handle
	name string
}

// realSite is where a real router lives: itself, and the BGP neighbour behind it.
type realSite struct {
	router, peer         site
	addr                 netip.Addr // source of its telemetry
	routerBGP, neighbour netip.Addr // the two ends of the BGP session
}

// world is the network: a host of collectors, the simulated routers behind one cable, and some real
// routers, each with a cable of its own.
type world struct {
	collectors, routers site
	real                []realSite
}

func newSite(e *lab.Env, name string) (site, error) {
	h, full, err := e.Namespace(name)
	return site{h, full}, err
}

func newWorld(e *lab.Env, realRouters int) (*world, error) {
	w := &world{}
	var err error
	if w.collectors, err = newSite(e, "collectors"); err != nil {
		return nil, err
	}
	if w.routers, err = newSite(e, "routers"); err != nil {
		return nil, err
	}
	host := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	if err := topo.Addresses(w.collectors.Handle, host(service4), host(service6)); err != nil {
		return nil, err
	}
	err = topo.Cable(
		topo.End{NS: w.collectors.Handle, Name: "routers", Addrs: prefixes("10.97.0.1/30", "fd00:97::1/64")},
		topo.End{NS: w.routers.Handle, Name: "up", Addrs: prefixes("10.97.0.2/30", "fd00:97::2/64")})
	if err != nil {
		return nil, err
	}
	// Addresses that are owned by range, not named one by one, count as foreign when a socket binds to them.
	if err := topo.Sysctl(w.routers.Handle, "net.ipv6.ip_nonlocal_bind", "1"); err != nil {
		return nil, err
	}
	if err := topo.Own(w.routers.Handle, devices4, devices6); err != nil {
		return nil, err
	}
	for _, r := range []struct {
		at  site
		dst netip.Prefix
		via string
	}{
		{w.routers, host(service4), "10.97.0.1"}, {w.routers, host(service6), "fd00:97::1"},
		{w.collectors, devices4, "10.97.0.2"}, {w.collectors, devices6, "fd00:97::2"},
	} {
		if err := topo.Route(r.at.Handle, r.dst, netip.MustParseAddr(r.via)); err != nil {
			return nil, err
		}
	}
	for i := range realRouters {
		if err := w.addReal(e, i+1); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// addReal wires up real router number n.
func (w *world) addReal(e *lab.Env, n int) error {
	var r realSite
	var err error
	if r.router, err = newSite(e, fmt.Sprintf("router%d", n)); err != nil {
		return err
	}
	if r.peer, err = newSite(e, fmt.Sprintf("peer%d", n)); err != nil {
		return err
	}
	up := netip.MustParseAddr(fmt.Sprintf("10.100.%d.1", n))
	r.addr = up.Next()
	r.routerBGP = netip.MustParseAddr(fmt.Sprintf("10.101.%d.1", n))
	r.neighbour = r.routerBGP.Next()
	net30 := func(a netip.Addr) []netip.Prefix { return []netip.Prefix{netip.PrefixFrom(a, 30)} }
	err = topo.Cable(
		topo.End{NS: w.collectors.Handle, Name: fmt.Sprintf("real%d", n), Addrs: net30(up)},
		topo.End{NS: r.router.Handle, Name: "up", Addrs: net30(r.addr)})
	if err != nil {
		return err
	}
	err = topo.Cable(
		topo.End{NS: r.router.Handle, Name: "down", Addrs: net30(r.routerBGP)},
		topo.End{NS: r.peer.Handle, Name: "up", Addrs: net30(r.neighbour)})
	if err != nil {
		return err
	}
	w.real = append(w.real, r)
	return nil
}

// connect gives a real router its route to the collectors; until then its telemetry has nowhere to go.
func (r realSite) connect() error {
	return topo.Route(r.router.Handle, netip.PrefixFrom(service4, 32), r.addr.Prev())
}

func prefixes(s ...string) []netip.Prefix {
	var p []netip.Prefix
	for _, s := range s {
		p = append(p, netip.MustParsePrefix(s))
	}
	return p
}

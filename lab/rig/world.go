// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// The addresses of the lab. Collectors share one address of each family, like one name in a router's
// configuration. Each simulated router has its own.
var (
	Service4 = netip.MustParseAddr("10.98.0.1")
	Service6 = netip.MustParseAddr("fd00:98::1")
	Devices4 = netip.MustParsePrefix("10.99.0.0/16")
	Devices6 = netip.MustParsePrefix("fd00:99::/64")
)

// Port is the UDP and TCP port of every collector.
const Port = 9991

// Site is a network namespace and its name.
type Site struct {
	*netns.Handle
	Name string
}

// RealSite holds a real router and the BGP neighbour behind it.
type RealSite struct {
	Router, Peer         Site
	Addr                 netip.Addr // source of its telemetry
	RouterBGP, Neighbour netip.Addr // the two ends of the BGP session
}

// World is the network: a host of collectors, the simulated routers behind one cable, and some real routers
// with a cable each.
type World struct {
	Collectors, Routers Site
	Real                []RealSite
}

func newSite(e *lab.Env, name string) (Site, error) {
	h, full, err := e.Namespace(name)
	return Site{h, full}, err
}

// NewWorld creates the network.
func NewWorld(e *lab.Env, realRouters int) (*World, error) {
	w := &World{}
	var err error
	if w.Collectors, err = newSite(e, "collectors"); err != nil {
		return nil, err
	}
	if w.Routers, err = newSite(e, "routers"); err != nil {
		return nil, err
	}
	host := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	if err := topo.Addresses(w.Collectors.Handle, host(Service4), host(Service6)); err != nil {
		return nil, err
	}
	err = topo.Cable(
		topo.End{NS: w.Collectors.Handle, Name: "routers", Addrs: prefixes("10.97.0.1/30", "fd00:97::1/64")},
		topo.End{NS: w.Routers.Handle, Name: "up", Addrs: prefixes("10.97.0.2/30", "fd00:97::2/64")})
	if err != nil {
		return nil, err
	}
	// Addresses owned by range are foreign to bind, unlike addresses added one by one.
	if err := topo.Sysctl(w.Routers.Handle, "net.ipv6.ip_nonlocal_bind", "1"); err != nil {
		return nil, err
	}
	if err := topo.Own(w.Routers.Handle, Devices4, Devices6); err != nil {
		return nil, err
	}
	for _, r := range []struct {
		at  Site
		dst netip.Prefix
		via string
	}{
		{w.Routers, host(Service4), "10.97.0.1"}, {w.Routers, host(Service6), "fd00:97::1"},
		{w.Collectors, Devices4, "10.97.0.2"}, {w.Collectors, Devices6, "fd00:97::2"},
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

// addReal adds real router number n.
func (w *World) addReal(e *lab.Env, n int) error {
	var r RealSite
	var err error
	if r.Router, err = newSite(e, fmt.Sprintf("router%d", n)); err != nil {
		return err
	}
	if r.Peer, err = newSite(e, fmt.Sprintf("peer%d", n)); err != nil {
		return err
	}
	up := netip.MustParseAddr(fmt.Sprintf("10.100.%d.1", n))
	r.Addr = up.Next()
	r.RouterBGP = netip.MustParseAddr(fmt.Sprintf("10.101.%d.1", n))
	r.Neighbour = r.RouterBGP.Next()
	net30 := func(a netip.Addr) []netip.Prefix { return []netip.Prefix{netip.PrefixFrom(a, 30)} }
	err = topo.Cable(
		topo.End{NS: w.Collectors.Handle, Name: fmt.Sprintf("real%d", n), Addrs: net30(up)},
		topo.End{NS: r.Router.Handle, Name: "up", Addrs: net30(r.Addr)})
	if err != nil {
		return err
	}
	err = topo.Cable(
		topo.End{NS: r.Router.Handle, Name: "down", Addrs: net30(r.RouterBGP)},
		topo.End{NS: r.Peer.Handle, Name: "up", Addrs: net30(r.Neighbour)})
	if err != nil {
		return err
	}
	w.Real = append(w.Real, r)
	return nil
}

// Connect gives a real router its route to the collectors. Without it its telemetry has no path.
func (r RealSite) Connect() error {
	return topo.Route(r.Router.Handle, netip.PrefixFrom(Service4, 32), r.Addr.Prev())
}

func prefixes(s ...string) []netip.Prefix {
	var p []netip.Prefix
	for _, s := range s {
		p = append(p, netip.MustParsePrefix(s))
	}
	return p
}

// Reachable waits until the routers reach the collectors over IPv6. A fresh link answers neighbour
// discovery only after a while, and connections fail with "no route to host" before.
func (w *World) Reachable(ctx context.Context, limit time.Duration) error {
	to := netip.AddrPortFrom(Service6, Port+1) // no listener there: a refusal proves reachability
	for deadline := time.Now().Add(limit); ; {
		var err error
		if nsErr := w.Routers.Do(func() error {
			var conn net.Conn
			if conn, err = net.DialTimeout("tcp", to.String(), time.Second); err == nil {
				conn.Close()
			}
			return nil
		}); nsErr != nil {
			return nsErr
		}
		if err == nil || errors.Is(err, unix.ECONNREFUSED) {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("collectors not reachable over IPv6 after %s: %w", limit, err)
		}
		if err := pause(ctx, pollInterval); err != nil {
			return err
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

const (
	port          = 9991    // of every service
	backlog       = 1024    // of every listener: weir's default
	receiveBuffer = 8 << 20 // bytes, of every UDP socket: weir's default
)

// devices4 holds the source addresses of the simulated routers.
var devices4 = netip.MustParsePrefix("10.99.0.0/16")

// site is one host of collectors. Hosts, wires and addresses are equal for all ways, so only the way
// differs.
type site struct {
	*netns.Handle
	name  string // of the way
	ns    string // of the network namespace
	addr  netip.Addr
	wire  int        // the receiving kernel thread of the wire
	group *lab.Group // all work on this host: this thread, and processes
}

// world is a number of sites, each with its own wire to the routers.
type world struct {
	env     *lab.Env
	routers *netns.Handle
	sites   int
}

func newWorld(e *lab.Env) (*world, error) {
	h, _, err := e.Namespace("routers")
	if err != nil {
		return nil, err
	}
	// Packets from a wire belong to sockets sending on it; nothing is forwarded.
	return &world{env: e, routers: h}, topo.Own(h, devices4)
}

// site adds another host.
func (w *world) site(name string) (*site, error) {
	w.sites++
	n := w.sites
	h, ns, err := w.env.Namespace(name)
	if err != nil {
		return nil, err
	}
	s := &site{Handle: h, name: name, ns: ns, addr: netip.AddrFrom4([4]byte{10, 98, byte(n), 1})}
	if s.group, err = w.env.Group(name); err != nil {
		return nil, err
	}
	here, there := netip.AddrFrom4([4]byte{10, 97, byte(n), 1}), netip.AddrFrom4([4]byte{10, 97, byte(n), 2})
	if err := topo.Addresses(h, netip.PrefixFrom(s.addr, 32)); err != nil {
		return nil, err
	}
	unique := fmt.Sprintf("%03x%c", os.Getpid()&0xfff, 'a'+n)
	receiver, _, err := topo.Wire(
		topo.End{NS: h, Name: unique, Addrs: []netip.Prefix{netip.PrefixFrom(here, 30)}},
		topo.End{NS: w.routers, Name: unique + "r", Addrs: []netip.Prefix{netip.PrefixFrom(there, 30)}})
	if err != nil {
		return nil, err
	}
	s.wire = receiver
	if err := s.group.Claim(receiver); err != nil {
		return nil, err
	}
	if err := topo.Route(w.routers, netip.PrefixFrom(s.addr, 32), here); err != nil {
		return nil, err
	}
	return s, topo.Route(h, devices4, there)
}

// service returns the destination of routers.
func (s *site) service() netip.AddrPort { return netip.AddrPortFrom(s.addr, port) }

// start starts a program on the site, and counts its cost.
func (s *site) start(e *lab.Env, c lab.Command) (*lab.Process, error) {
	c.Namespace = s.ns
	p, err := e.Start(c)
	if err != nil {
		return nil, err
	}
	return p, s.group.Claim(p.PID)
}

// cpu returns the site's CPU time so far.
func (s *site) cpu() (time.Duration, error) { return s.group.CPU() }

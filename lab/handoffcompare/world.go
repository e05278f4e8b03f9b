// SPDX-License-Identifier: Apache-2.0

package handoffcompare

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/topo"
)

const servicePort = 9000

// balancer is the name of the load balancer.
const balancer = "compare"

// serviceAddr is on every server.
var serviceAddr = netip.MustParseAddr("10.55.0.1")

// world is a client, servers, and two namespaces between them with equal wiring. One holds the load
// balancer, with weir's programs at its devices. The other routes without them, and HAProxy listens in it.
// The ways can alternate every few milliseconds, and none pays for another.
type world struct {
	env     *lab.Env
	client  *netns.Handle
	lbs     [2]*netns.Handle
	names   [2]string // of their namespaces
	servers []*server
	tls     string // of the load balancer's agent, without clients
	dropped uint64 // packets dropped by the load balancer
}

// The two namespaces.
const (
	withWeir = iota
	without
)

// middle returns a namespace's address towards the client, towardsClient the client's.
func middle(which int) netip.Addr        { return netip.AddrFrom4([4]byte{10, 1, byte(which), 1}) }
func towardsClient(which int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(which), 2}) }
func gateway(which, i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 2 + byte(which), byte(i), 1})
}
func serverAddr(which, i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 2 + byte(which), byte(i), 2})
}
func towards(i int) string { return fmt.Sprint("s", i) }

func newWorld(e *lab.Env, servers int) (*world, error) {
	certs, err := rig.NewCertificates(e, "certificates")
	if err != nil {
		return nil, err
	}
	w := &world{env: e, tls: certs.TLS(balancer)}
	if w.client, _, err = e.Namespace("client"); err != nil {
		return nil, err
	}
	for which, name := range []string{"lb", "plain"} {
		if w.lbs[which], w.names[which], err = e.Namespace(name); err != nil {
			return nil, err
		}
		if err := w.wireClient(which); err != nil {
			return nil, err
		}
	}
	for i := range servers {
		if err := w.addServer(i); err != nil {
			return nil, fmt.Errorf("server %d: %w", i, err)
		}
	}
	return w, nil
}

func (w *world) wireClient(which int) error {
	f := w.lbs[which]
	err := topo.Cable(topo.End{NS: w.client, Name: fmt.Sprint("w", which), Addrs: []netip.Prefix{netip.PrefixFrom(towardsClient(which), 24)}},
		topo.End{NS: f, Name: "c0", Addrs: []netip.Prefix{netip.PrefixFrom(middle(which), 24)}})
	if err != nil {
		return err
	}
	to := netip.MustParsePrefix("10.55.0.1/32")
	if which == without {
		to = netip.MustParsePrefix("10.3.0.0/16") // the servers behind it
	}
	return errors.Join(topo.Route(w.client, to, middle(which)), topo.Addresses(f), topo.Sysctl(f, "net.ipv4.ip_forward", "1"))
}

func (w *world) addServer(i int) error {
	ns, _, err := w.env.Namespace(fmt.Sprint("server", i))
	if err != nil {
		return err
	}
	for which, f := range w.lbs {
		err := topo.Cable(topo.End{NS: ns, Name: fmt.Sprint("w", which), Addrs: []netip.Prefix{netip.PrefixFrom(serverAddr(which, i), 24)}},
			topo.End{NS: f, Name: towards(i), Addrs: []netip.Prefix{netip.PrefixFrom(gateway(which, i), 24)}})
		if err != nil {
			return err
		}
		if err := topo.Route(ns, netip.PrefixFrom(towardsClient(which), 24).Masked(), gateway(which, i)); err != nil {
			return err
		}
	}
	if err := topo.Addresses(ns, netip.PrefixFrom(serviceAddr, 32)); err != nil {
		return err
	}
	s, err := startServer(w.env, ns, byte(i))
	if err != nil {
		return err
	}
	w.servers = append(w.servers, s)
	return nil
}

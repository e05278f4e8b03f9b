// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/tunnel"
	"github.com/weir-project/weir/feature/handoff/tunnel/tunneltest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// Both load balancers announce the service, and this address for the backends' agents and tunnels.
var followed = netip.MustParseAddr("10.9.9.9")

const birdBalancer = `
router id 10.3.%[1]d.2;
protocol device { scan time 1; }
protocol static {
	ipv4;
	route 10.55.0.1/32 blackhole;
	route 10.9.9.9/32 blackhole;
}
protocol bgp up {
	local as 64512;
	neighbor 10.3.%[1]d.1 as 64513;
	connect retry time 1;
	error wait time 1, 2;
	ipv4 {
		import none;
		export filter {
			if source != RTS_STATIC then reject;
			bgp_med = %[2]d;
			accept;
		};
	};
}
`

const birdRouter = `
router id 10.3.0.1;
protocol device { scan time 1; }
protocol direct { ipv4; }
protocol kernel { ipv4 { export where source = RTS_BGP; }; }
template bgp balancer {
	local as 64513;
	connect retry time 1;
	error wait time 1, 2;
	ipv4 { import all; export none; };
}
protocol bgp a from balancer { neighbor 10.3.0.2 as 64512; }
protocol bgp b from balancer { neighbor 10.3.1.2 as 64512; }
`

// TestBGP routes a service and its backends' agents to one of two load balancers by BGP. That load balancer's machine
// is lost, and returns without state. Sessions continue, moved or not, and can move with either load balancer.
func TestBGP(t *testing.T) {
	b := newBalancers(t)
	r := nstest.NewNetns(t)
	b.sysctl(r, map[string]string{"ip_forward": "1", "conf/all/rp_filter": "0"})
	for i := range 2 {
		nstest.Cable(t, b.ns[i], "e", r, fmt.Sprint("f", i))
		nstest.Address(t, b.ns[i], "e", prefix("10.3.%d.2/30", i))
		nstest.Address(t, r, fmt.Sprint("f", i), prefix("10.3.%d.1/30", i))
		nstest.Address(t, b.ns[i], "lo", netip.PrefixFrom(followed, 32))
		b.gateway(b.ns[i], fmt.Sprintf("10.3.%d.1", i))
		nstest.Cable(t, b.others[i], "w0", r, fmt.Sprint("c", i))
		nstest.Address(t, b.others[i], "w0", prefix("10.1.%d.2/24", i))
		nstest.Address(t, r, fmt.Sprint("c", i), prefix("10.1.%d.1/24", i))
		b.gateway(b.others[i], fmt.Sprintf("10.1.%d.1", i))
		s := b.servers[i].ns
		nstest.Cable(t, s, "w0", r, fmt.Sprint("s", i))
		nstest.Address(t, s, "w0", prefix("10.4.%d.2/24", i))
		nstest.Address(t, r, fmt.Sprint("s", i), prefix("10.4.%d.1/24", i))
		b.gateway(s, fmt.Sprintf("10.4.%d.1", i))
		b.in(s, func() error {
			return tunneltest.NewBackend(tunneltest.End{Local: netip.MustParseAddr(fmt.Sprintf("10.4.%d.2", i)), LB: followed, MTU: 1450, Services: []netip.Addr{b.at.Addr()}})
		})
	}
	dir := t.TempDir()
	bird := func(i int) (stop func()) {
		conf := b.file("bird.conf", fmt.Sprintf(birdBalancer, i, 100+100*i))
		return b.daemon(b.ns[i], "bird", "-f", "-c", conf, "-s", fmt.Sprintf("%s/ctl%d", dir, i), "-P", fmt.Sprintf("%s/pid%d", dir, i))
	}
	b.daemon(r, "bird", "-f", "-c", b.file("bird.conf", birdRouter), "-s", dir+"/ctl", "-P", dir+"/pid")
	leadsTo := func(i int) {
		t.Helper()
		b.eventually("the router leads to "+balancerNames[i], func() (yes bool) {
			b.in(r, func() error {
				for _, a := range []netip.Addr{b.at.Addr(), followed} {
					routes, err := netlink.RouteGet(a.AsSlice())
					if yes = err == nil && len(routes) == 1 && routes[0].Gw.String() == fmt.Sprintf("10.3.%d.2", i); !yes {
						return nil
					}
				}
				return nil
			})
			return yes
		})
	}
	var stops [2]func()
	for i := range b.ns {
		b.start(i, "[e]", "tunnel_mtu: 1450\n")
		stops[i] = bird(i)
	}
	leadsTo(0)
	for i, s := range b.servers {
		b.serve(s, fmt.Sprintf("10.4.%d.2", i), followed.String()+":7946", tunnel.Device)
	}
	b.leads(0)
	clients := append(b.dialBy(b.others[0], 3), b.dialBy(b.others[1], 3)...)
	b.moveSome(clients)

	b.port(r, "f0", false) // the machine is lost
	stops[0]()
	b.stops[0]()
	leadsTo(1)
	b.goOn(clients)
	b.leads(1)
	b.moveSome(clients)

	if err := lb.Remove(t.Context(), kernel.OpenRoot(b.root.Path()), b.ns[0], balancerNames[0]); err != nil {
		t.Fatal(err)
	}
	b.port(r, "f0", true)
	b.start(0, "[e]", "tunnel_mtu: 1450\n")
	bird(0)
	leadsTo(0)
	b.goOn(clients)
	b.leads(0)
	b.moveSome(clients)
	b.goOn(clients)
}

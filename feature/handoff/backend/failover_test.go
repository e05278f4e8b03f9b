// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// balancers are two load balancers. A network protocol gives the addresses to one of them.
type balancers struct {
	*world
	ns     [2]*netns.Handle
	stops  [2]func()
	others [2]*netns.Handle // namespaces of further clients
}

var balancerNames = [2]string{"lb-a", "lb-b"}

// start starts a load balancer with these devices.
func (b *balancers) start(i int, devices, more string) {
	b.t.Helper()
	cert, key, signers := b.ca.Files(balancerNames[i])
	b.stops[i] = b.play(b.ns[i], "lb", fmt.Sprintf(`
name: %s
listen: 0.0.0.0:7946
tls: {certificate: %s, key: %s, ca: %s}
devices: %s
register: true
partner: {name: %s, address: 10.9.0.%d:7946}
services:
  talk: {number: 3, listen: [tcp %s]}
%s`, balancerNames[i], cert, key, signers, devices, balancerNames[1-i], 2-i, b.at, more))
}

// serve starts a backend's agent with a load balancer address.
func (b *balancers) serve(s *server, address, lb, device string) {
	b.t.Helper()
	cert, key, signers := b.ca.Files(fmt.Sprint("s", s.number))
	s.keep()
	b.play(s.ns, "server", fmt.Sprintf(`
name: s%d
number: %d
address: %s
listen: %s:7947
tls: {certificate: %s, key: %s, ca: %s}
lb: {address: %s, names: [lb-a, lb-b]}
devices: [%s]
keeper: %s
timeout: %s
`, s.number, s.number, address, address, cert, key, signers, lb, device, s.keeper, patience))
	s.serve()
}

func (b *balancers) status(i int) (lb.Status, bool) {
	all, err := lb.Statuses(b.t.Context(), kernel.OpenRoot(b.root.Path()))
	for _, s := range all {
		if err == nil && s.Name == balancerNames[i] && s.Agent && s.Partner != nil {
			return s, true
		}
	}
	return lb.Status{}, false
}

// leads waits until all backends' agents are connected to a load balancer.
func (b *balancers) leads(i int) {
	b.t.Helper()
	b.eventually("the servers' agents are at "+balancerNames[i], func() bool {
		s, ok := b.status(i)
		n := 0
		for _, h := range s.Backends {
			if h.Connected && h.Up {
				n++
			}
		}
		return ok && n == len(b.servers)
	})
	b.acquainted()
}

func (b *balancers) goOn(clients []*client) {
	b.t.Helper()
	answers := make(chan error, len(clients))
	for _, c := range clients {
		go func() { answers <- c.ask("still there") }()
	}
	for range clients {
		if err := <-answers; err != nil {
			b.t.Fatal(err)
		}
	}
}

// dialBy connects n clients from a namespace.
func (b *balancers) dialBy(ns *netns.Handle, n int) (out []*client) {
	b.t.Helper()
	before := b.client
	b.client = ns
	defer func() { b.client = before }()
	for range n {
		c := b.dialAt(b.at, 0)
		if err := c.ask("hello"); err != nil {
			b.t.Fatal(err)
		}
		out = append(out, c)
	}
	return out
}

// moveSome moves every second session to the other backend.
func (b *balancers) moveSome(clients []*client) {
	b.t.Helper()
	for i, c := range clients {
		if i%2 == 0 {
			b.mustSendAt(c, 3-b.servesAt(c))
		}
	}
	b.settled()
}

// daemon runs a network daemon in a namespace until the test ends, or stop is called.
func (b *balancers) daemon(ns *netns.Handle, name string, args ...string) (stop func()) {
	b.t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		b.t.Fatalf("%v: ./bootstrap --install test installs it", err)
	}
	c := exec.Command(path, args...)
	c.Stdout, c.Stderr = testWriter{b.t}, testWriter{b.t}
	c.WaitDelay = time.Second // its children have the pipe, too
	b.in(ns, c.Start)
	done := make(chan struct{})
	go func() {
		_ = c.Wait() // ended by the test
		close(done)
	}()
	stop = func() {
		_ = c.Process.Signal(syscall.SIGTERM) // it may have ended
		select {
		case <-done:
		case <-time.After(longest):
			_ = c.Process.Kill()
		}
	}
	b.t.Cleanup(stop)
	return stop
}

func (b *balancers) file(name, text string) string {
	b.t.Helper()
	file := filepath.Join(b.t.TempDir(), name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		b.t.Fatal(err)
	}
	return file
}

// plug connects a namespace to a segment of the switch.
func (b *balancers) plug(sw *netns.Handle, segment string, ns *netns.Handle, device, port string, addrs ...netip.Prefix) {
	b.t.Helper()
	nstest.Cable(b.t, ns, device, sw, port)
	nstest.Address(b.t, ns, device, addrs...)
	b.in(sw, func() error {
		l, err := netlink.LinkByName(port)
		if err != nil {
			return err
		}
		br, err := netlink.LinkByName(segment)
		if err != nil {
			return err
		}
		return netlink.LinkSetMaster(l, br)
	})
}

// port sets a port of the switch up or down.
func (b *balancers) port(sw *netns.Handle, name string, up bool) {
	b.t.Helper()
	b.in(sw, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if up {
			return netlink.LinkSetUp(l)
		}
		return netlink.LinkSetDown(l)
	})
}

func (b *balancers) sysctl(ns *netns.Handle, values map[string]string) {
	b.t.Helper()
	b.in(ns, func() error {
		for name, v := range values {
			if err := os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(v), 0); err != nil {
				return err
			}
		}
		return nil
	})
}

// gateway sets a namespace's default route.
func (b *balancers) gateway(ns *netns.Handle, via string) {
	b.t.Helper()
	b.in(ns, func() error {
		return netlink.RouteReplace(&netlink.Route{Gw: net.ParseIP(via), Dst: nstest.Anywhere(netip.MustParseAddr(via))})
	})
}

func newBalancers(t *testing.T) *balancers {
	t.Helper()
	nstest.NeedRoot(t)
	if err := probe.TCRedirect.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
	b := &balancers{world: newNetworkless(t, at4)}
	for i := range b.ns {
		b.ns[i], b.others[i] = nstest.NewNetns(t), nstest.NewNetns(t)
		b.sysctl(b.ns[i], map[string]string{"ip_forward": "1", "conf/all/rp_filter": "0"})
		s := &server{w: b.world, number: i + 1, ns: nstest.NewNetns(t)}
		nstest.Address(t, s.ns, "lo", netip.PrefixFrom(b.at.Addr(), 32))
		b.sysctl(s.ns, map[string]string{"conf/all/rp_filter": "0"})
		b.servers = append(b.servers, s)
	}
	nstest.Cable(t, b.ns[0], "x", b.ns[1], "x")
	for i, ns := range b.ns {
		nstest.Address(t, ns, "x", prefix("10.9.0.%d/30", i+1))
	}
	return b
}

const keepalivedConf = `
global_defs {
	router_id %[1]s
	vrrp_version 3
}
vrrp_sync_group weir {
	group {
		clients
		servers
	}
}
vrrp_instance clients {
	state BACKUP
	nopreempt
	interface c
	virtual_router_id 51
	priority %[2]d
	advert_int 1
	virtual_ipaddress {
		10.1.0.1/24
	}
}
vrrp_instance servers {
	state BACKUP
	nopreempt
	interface s
	virtual_router_id 52
	priority %[2]d
	advert_int 1
	virtual_ipaddress {
		10.2.0.1/24
	}
}
`

// TestKeepalived gives the addresses to one of two load balancers with keepalived. The active machine is lost,
// returns, and finally both are active. Only keepalived chooses the survivor. Sessions continue, moved or not, and
// can move.
func TestKeepalived(t *testing.T) {
	b := newBalancers(t)
	sw := nstest.NewNetns(t)
	for _, segment := range []string{"out", "in"} {
		b.in(sw, func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = segment
			return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
		})
		b.port(sw, segment, true)
	}
	for i := range b.ns {
		b.plug(sw, "out", b.ns[i], "c", fmt.Sprint("f", i, "c"), prefix("10.1.0.%d/24", 11+i))
		b.plug(sw, "in", b.ns[i], "s", fmt.Sprint("f", i, "s"), prefix("10.2.0.%d/24", 11+i))
		b.plug(sw, "out", b.others[i], "w0", fmt.Sprint("c", i), prefix("10.1.0.%d/24", 101+i))
		b.plug(sw, "in", b.servers[i].ns, "w0", fmt.Sprint("s", i), prefix("10.2.0.%d/24", 101+i))
		b.gateway(b.others[i], "10.1.0.1")
		b.gateway(b.servers[i].ns, "10.2.0.1")
	}
	has := func(i int) (yes bool) {
		b.in(b.ns[i], func() error {
			for device, want := range map[string]string{"c": "10.1.0.1", "s": "10.2.0.1"} {
				l, err := netlink.LinkByName(device)
				if err != nil {
					return err
				}
				all, err := dump.AddrList(l, netlink.FAMILY_V4)
				if err != nil {
					return err
				}
				yes = false
				for _, a := range all {
					yes = yes || a.IP.String() == want
				}
				if !yes {
					return nil
				}
			}
			return nil
		})
		return yes
	}
	for i := range b.ns {
		b.start(i, "[c, s]", "")
		conf := b.file("keepalived.conf", fmt.Sprintf(keepalivedConf, balancerNames[i], 150-50*i))
		dir := t.TempDir()
		b.daemon(b.ns[i], "keepalived", "--dont-fork", "--log-console", "--vrrp", "--use-file="+conf, "--pid="+dir+"/parent", "--vrrp_pid="+dir+"/vrrp")
		b.eventually("the first one has the addresses", func() bool { return has(0) })
	}
	for i, s := range b.servers {
		b.serve(s, fmt.Sprintf("10.2.0.%d", 101+i), "10.2.0.1:7946", "w0")
	}
	b.leads(0)
	clients := append(b.dialBy(b.others[0], 4), b.dialBy(b.others[1], 4)...)
	b.moveSome(clients)
	b.eventually("the second one has heard of them", func() bool {
		s, ok := b.status(1)
		return ok && s.Partner.Heard > 0 && s.Partner.Agents == 2 && s.Backends != nil
	})

	b.port(sw, "f0c", false) // the machine is lost
	b.port(sw, "f0s", false)
	b.stops[0]()
	b.eventually("the second one has the addresses", func() bool { return has(1) })
	b.goOn(clients)
	b.leads(1)
	b.moveSome(clients)
	b.goOn(clients)

	if err := lb.Remove(t.Context(), kernel.OpenRoot(b.root.Path()), b.ns[0], balancerNames[0]); err != nil { // it returns without state
		t.Fatal(err)
	}
	b.start(0, "[c, s]", "")
	b.eventually("the first one knows what the second one knows", func() bool {
		s, ok := b.status(0)
		return ok && !s.Starting && s.Partner.Connected
	})
	// From here on the two do not hear each other, and both have the addresses. The network sends one client's
	// packets to each, and the backends' packets to the first.
	drop := b.file("rules", "table ip split {\n chain hear {\n type filter hook input priority 0\n ip protocol 112 drop\n }\n}\n")
	for _, ns := range b.ns {
		b.in(ns, func() error { return exec.Command("nft", "-f", drop).Run() })
	}
	b.port(sw, "f0c", true)
	b.port(sw, "f0s", true)
	b.eventually("both have the addresses", func() bool { return has(0) && has(1) })
	b.neighbour(b.others[0], "10.1.0.1", b.ns[0], "c")
	b.neighbour(b.others[1], "10.1.0.1", b.ns[1], "c")
	for _, s := range b.servers {
		b.neighbour(s.ns, "10.2.0.1", b.ns[0], "s")
	}
	b.leads(0)
	b.goOn(clients)
	b.moveSome(clients)
	b.eventually("both say that they carry packets", func() bool {
		b.goOn(clients)
		one, ok := b.status(0)
		two, also := b.status(1)
		return ok && also && one.Partner.Seconds > 0 && two.Partner.Seconds > 0 && one.Partner.Carries && one.Partner.There
	})
	b.partition(clients)
}

// partition cuts the connection between two active load balancers. A session moved meanwhile stalls if its packets
// pass the uninformed one. It is not reset.
func (b *balancers) partition(clients []*client) {
	b.t.Helper()
	b.link(false)
	b.eventually("they do not hear each other", func() bool {
		b.goOn(clients)
		one, ok := b.status(0)
		two, also := b.status(1)
		return ok && also && !one.Partner.Connected && !two.Partner.Connected && two.Partner.Apart
	})
	c := clients[len(clients)-1] // its packets pass the second one
	at := b.servesAt(c)
	b.eventually("it moves", func() bool {
		if b.servesAt(c) != at {
			return true
		}
		_ = b.sendAt(c, 3-at) // retried while the ways are closed
		return false
	})
	strays := b.servers[at-1].status().Quarantine.Strays
	answer := make(chan error, 1)
	go func() { answer <- c.ask("where are you") }()
	b.eventually("its packets come to the server that it has left", func() bool { return b.servers[at-1].status().Quarantine.Strays > strays })
	b.link(true)
	if err := <-answer; err != nil {
		b.t.Error(err)
	}
	b.goOn(clients)
}

// link sets the connection between the load balancers up or down.
func (b *balancers) link(up bool) {
	b.t.Helper()
	b.port(b.ns[0], "x", up)
}

// neighbour makes a namespace send packets for an address to a load balancer.
func (b *balancers) neighbour(ns *netns.Handle, addr string, of *netns.Handle, device string) {
	b.t.Helper()
	var mac net.HardwareAddr
	b.in(of, func() error {
		i, err := net.InterfaceByName(device)
		if err == nil {
			mac = i.HardwareAddr
		}
		return err
	})
	b.in(ns, func() error {
		l, err := netlink.LinkByName("w0")
		if err != nil {
			return err
		}
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: net.ParseIP(addr), HardwareAddr: mac, State: netlink.NUD_PERMANENT})
	})
}

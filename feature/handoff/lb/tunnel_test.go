// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/locate"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/tunnel"
	"github.com/weir-project/weir/feature/handoff/tunnel/tunneltest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// newRoutedScene puts a router between the load balancer and its two hosts. The first host's end of
// the tunnel is created by the commands in package tunnel, the second's by NewBackend. With outer6
// the router has IPv6 only.
func newRoutedScene(t *testing.T, outer6 bool) *scene {
	t.Helper()
	nstest.NeedRoot(t)
	if err := kernel.Require(Needs); err != nil {
		t.Skip("need: kernel", err)
	}
	ip, err := exec.LookPath("ip")
	if err != nil {
		t.Skip("need: tool ip")
	}
	sc := &scene{devices: []string{"c", "u"}}
	lb, router := nstest.NewNetns(t), nstest.NewNetns(t)
	sc.middle = lb
	sc.client = nstest.NewNetns(t)
	nstest.Cable(t, sc.client, "w0", lb, "c")
	nstest.Address(t, sc.client, "w0", prefix("10.1.0.2/24"), prefix("fd01::2/64"))
	nstest.Address(t, lb, "c", prefix("10.1.0.1/24"), prefix("fd01::1/64"))
	route(t, sc.client, "w0", "0.0.0.0/0", "10.1.0.1")
	route(t, sc.client, "w0", "::/0", "fd01::1")
	nstest.Cable(t, lb, "u", router, "f")
	end := func(net, host int) netip.Prefix {
		if outer6 {
			return prefix("fd0%d::%d/64", net, host)
		}
		return prefix("10.%d.0.%d/24", net, host)
	}
	nstest.Address(t, lb, "u", end(2, 1))
	nstest.Address(t, router, "f", end(2, 2))
	everywhere := map[bool]string{false: "0.0.0.0/0", true: "::/0"}[outer6]
	route(t, lb, "u", everywhere, end(2, 2).Addr().String())
	forward(t, router)
	forward(t, lb)
	var hosts []Backend
	for i := range sc.hosts {
		h := nstest.NewNetns(t)
		sc.hosts[i] = h
		name := fmt.Sprint("h", i+1)
		nstest.Cable(t, h, "w0", router, name)
		nstest.Address(t, h, "w0", end(3+i, 2))
		nstest.Address(t, router, name, end(3+i, 1))
		nstest.Address(t, h, "lo", netip.PrefixFrom(service4.Addr(), 32), netip.PrefixFrom(service6.Addr(), 128))
		route(t, h, "w0", everywhere, end(3+i, 1).Addr().String())
		var place locate.Location
		do(t, lb, func() (err error) { place, err = locate.Find(end(3+i, 2).Addr()); return err })
		if place.Tunnel != end(3+i, 2).Addr() || place.Interface != 0 {
			t.Fatalf("a host behind a router is at %+v", place)
		}
		hosts = append(hosts, Backend{Number: move.Backend(i + 1), Name: name, Weight: 1, Tunnel: place.Tunnel})
		sc.mtu = place.MTU
	}
	do(t, lb, func() (err error) {
		if sc.f, err = New(Options{Devices: sc.devices, TunnelMTU: sc.mtu}); err != nil {
			return err
		}
		t.Cleanup(sc.f.Close)
		return sc.f.SetBackends(hosts)
	})
	// Set the hosts in the load balancer first. A new device solicits routers at once, and packets
	// of an unknown host count as unknown source.
	near := end(2, 1).Addr()
	byHand(t, sc.hosts[0], ip, hosts[0].Tunnel, near, sc.mtu)
	do(t, sc.hosts[1], func() error {
		return tunneltest.NewBackend(tunneltest.End{Local: hosts[1].Tunnel, LB: near, MTU: sc.mtu, Services: []netip.Addr{service4.Addr(), service6.Addr()}})
	})
	for id, listen := range []netip.AddrPort{service4, service6} {
		if err := sc.f.SetService(Service{ID: id, Listen: listen, Proto: unix.IPPROTO_TCP}); err != nil {
			t.Fatal(err)
		}
	}
	return sc
}

// byHand runs the commands in package tunnel's documentation.
func byHand(t *testing.T, h *netns.Handle, ip string, far, near netip.Addr, mtu int) {
	t.Helper()
	for _, line := range []string{
		fmt.Sprintf("link add weir-tun address 02:77:65:69:72:02 type vxlan id 22341 dstport 4789 srcport 512 1023 local %s remote %s nolearning udp6zerocsumrx", far, near),
		fmt.Sprintf("link set weir-tun mtu %d up", mtu),
		"neigh add 169.254.85.1 lladdr 02:77:65:69:72:01 dev weir-tun nud permanent",
		"route add default via 169.254.85.1 dev weir-tun onlink table 22341",
		"rule add from 10.55.0.1 lookup 22341",
		"-6 neigh add fe80::7765:6972 lladdr 02:77:65:69:72:01 dev weir-tun nud permanent",
		"-6 route add default via fe80::7765:6972 dev weir-tun onlink table 22341",
		"-6 rule add from fd55::1 lookup 22341",
	} {
		do(t, h, func() error {
			if out, err := exec.Command(ip, strings.Fields(line)...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", line, err, out)
			}
			return nil
		})
	}
}

// TestTunnel checks that backends behind routers are served through tunnels, for each combination
// of inner and outer family, and recognized by their tunnels.
func TestTunnel(t *testing.T) {
	for _, outer6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "over IPv4", true: "over IPv6"}[outer6], func(t *testing.T) {
			sc := newRoutedScene(t, outer6)
			for id, at := range []netip.AddrPort{service4, service6} {
				serve(t, sc.hosts, at)
				of := map[byte]int{}
				for range 20 {
					c := dial(t, sc.client, at)
					first, err := ask(c, "a", patience)
					if err != nil {
						t.Fatal(at, err)
					}
					// By now three packets of each side are counted. The handshake's ACK may be late.
					again, err := ask(c, "b", patience)
					if err != nil || first[0] != again[0] {
						t.Fatalf("%q, then %q, %v", first, again, err)
					}
					of[first[0]]++
					fl, err := sc.f.Flow(keyOfConn(c, id))
					if err != nil || int(fl.Owner) != int(first[0]-'0') || fl.In < 3 || fl.Out < 3 {
						t.Errorf("flow %+v, %v, served by %s", fl, err, first)
					}
				}
				if of['1'] < 2 || of['2'] < 2 {
					t.Errorf("20 flows: %v", of)
				}
				echoMuch(t, dial(t, sc.client, at))
			}
			for _, ns := range append(sc.hosts[:], sc.middle) { // only root can send from these ports
				do(t, ns, func() error {
					l, err := netlink.LinkByName(tunnel.Device)
					if v, ok := l.(*netlink.Vxlan); err == nil && (!ok || v.PortLow != tunnel.PortLow || v.PortHigh != tunnel.PortHigh) {
						err = fmt.Errorf("source ports of %+v", l)
					}
					return err
				})
			}
			if c, err := sc.f.Counts(); err != nil || c.Mute+c.NoBackend+c.UnknownSource+c.Full+c.Big != 0 {
				t.Errorf("%+v, %v", c, err)
			}
		})
	}
}

// echoMuch sends 4 MiB in large segments and requires as many bytes back, without the host's
// numbers.
func echoMuch(t *testing.T, c net.Conn) {
	t.Helper()
	const size = 4 << 20
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(bytes.Repeat([]byte("weir"), size/4))
		sent <- err
	}()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1<<16)
	for got := 0; got < size; {
		n, err := c.Read(b)
		if err != nil {
			t.Fatalf("after %d of %d bytes: %v", got, size, err)
		}
		for _, x := range b[:n] {
			if x != '1' && x != '2' {
				got++
			}
		}
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
}

// TestTunnelTooBig checks that a packet too big for the tunnel is answered by a Packet Too Big. A
// client ignoring the announced MSS learns the path MTU.
func TestTunnelTooBig(t *testing.T) {
	sc := newRoutedScene(t, false)
	for id, c := range []struct {
		at            netip.AddrPort
		network       string
		level, option int
	}{{service4, "udp4", unix.IPPROTO_IP, unix.IP_MTU}, {service6, "udp6", unix.IPPROTO_IPV6, unix.IPV6_MTU}} {
		if err := sc.f.SetService(Service{ID: 2 + id, Listen: c.at, Proto: unix.IPPROTO_UDP}); err != nil {
			t.Fatal(err)
		}
		listenUDP(t, sc.hosts, c.at)
		conn := dialUDP(t, sc.client, c.at)
		raw, err := conn.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		path := func() (mtu int) {
			if e := raw.Control(func(fd uintptr) { mtu, err = unix.GetsockoptInt(int(fd), c.level, c.option) }); e != nil || err != nil {
				t.Fatal(e, err)
			}
			return mtu
		}
		if err := raw.Control(func(fd uintptr) { // as TCP does: no fragments
			if c.level == unix.IPPROTO_IP {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
			} else {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
			}
		}); err != nil {
			t.Fatal(err)
		}
		if before := path(); before != 1500 {
			t.Fatalf("the path's MTU is %d before anything was sent", before)
		}
		if _, err := conn.Write(make([]byte, 1440)); err != nil {
			t.Fatal(err)
		}
		nstest.Eventually(t, func() error {
			if path() != sc.mtu {
				return fmt.Errorf("%s: the path's MTU is %d, want %d", c.at, path(), sc.mtu)
			}
			return nil
		})
		if got, err := askUDP(conn, strings.Repeat("x", 1300)); err != nil || len(got) != 1301 {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	}
	if c, err := sc.f.Counts(); err != nil || c.Big != 2 {
		t.Errorf("%+v, %v", c, err)
	}
	// A datagram with fragmentation allowed arrives. The tunnel's packet has two fragments.
	conn := dialUDP(t, sc.client, service4)
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if e := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_INTERFACE)
	}); e != nil || err != nil {
		t.Fatal(e, err)
	}
	if got, err := askUDP(conn, strings.Repeat("x", 1472)); err != nil || len(got) != 1473 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// TestLocate checks that a host on the segment is found by its neighbour entry, and a silent one is
// an error.
func TestLocate(t *testing.T) {
	sc := newScene(t)
	for _, a := range []string{"10.2.1.2", "fd02:1::2"} {
		var p locate.Location
		do(t, sc.f.ns, func() (err error) { p, err = locate.Find(netip.MustParseAddr(a)); return err })
		if want := mac(t, sc.hosts[1]); p.Tunnel.IsValid() || p.MAC.String() != want.String() || p.Interface != nstest.Ifindex(t, sc.f.ns, "h2") || p.MTU != 1500 {
			t.Errorf("%s is at %+v, want %s", a, p, want)
		}
	}
	// Packets to these addresses would reach every host on the segment.
	for _, a := range []string{"10.2.1.255", "ff02::1"} {
		if err := sc.f.ns.Do(func() error { _, err := locate.Find(netip.MustParseAddr(a)); return err }); err == nil || !strings.Contains(err.Error(), "give the backend's") {
			t.Errorf("%s: %v", a, err)
		}
	}
	err := sc.f.ns.Do(func() error { _, err := locate.Find(netip.MustParseAddr("10.2.1.77")); return err })
	if err == nil || !strings.Contains(err.Error(), "is the backend up?") {
		t.Errorf("%v", err)
	}
}

// TestLocateMoved checks that a host's new MAC address is found, although the kernel has a stale
// one.
func TestLocateMoved(t *testing.T) {
	sc := newScene(t)
	do(t, sc.f.ns, func() error { // shortens eight seconds to one
		var errs []error
		for _, family := range []string{"ipv4", "ipv6"} {
			for name, value := range map[string]string{"delay_first_probe_time": "0", "retrans_time_ms": "50"} {
				errs = append(errs, os.WriteFile("/proc/sys/net/"+family+"/neigh/h2/"+name, []byte(value), 0))
			}
		}
		return errors.Join(errs...)
	})
	old := net.HardwareAddr{2, 0, 0, 0, 0, 0x99}
	for _, a := range []string{"10.2.1.2", "fd02:1::2"} {
		at := netip.MustParseAddr(a)
		do(t, sc.f.ns, func() error {
			return netlink.NeighSet(&netlink.Neigh{LinkIndex: nstest.Ifindex(t, sc.f.ns, "h2"), IP: at.AsSlice(), HardwareAddr: old, State: netlink.NUD_STALE})
		})
		var p locate.Location
		nstest.Eventually(t, func() error {
			err := sc.f.ns.Do(func() (err error) { p, err = locate.Find(at); return err })
			if p.MAC.String() != mac(t, sc.hosts[1]).String() {
				return fmt.Errorf("%s is still at %s: %v", a, p.MAC, err)
			}
			return nil
		})
	}
}

func dialUDP(t *testing.T, ns *netns.Handle, to netip.AddrPort) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	do(t, ns, func() (err error) {
		c, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		return err
	})
	t.Cleanup(func() { c.Close() })
	return c
}

// listenUDP echoes at both hosts, with the host's number before the data.
func listenUDP(t *testing.T, hosts [2]*netns.Handle, at netip.AddrPort) {
	t.Helper()
	for i, ns := range hosts {
		c := nstest.ListenUDP(t, ns, at)
		go func() {
			b := make([]byte, 1<<16)
			for {
				n, from, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				if _, err := c.WriteToUDPAddrPort(append([]byte(fmt.Sprint(i+1)), b[:n]...), from); err != nil && !strings.Contains(err.Error(), "message too long") {
					return
				}
			}
		}()
	}
}

func askUDP(c *net.UDPConn, word string) (string, error) {
	b := make([]byte, 1<<16)
	for end := time.Now().Add(patience); time.Now().Before(end); { // UDP may lose packets
		if _, err := io.WriteString(c, word); err != nil {
			continue // an error about an earlier packet
		}
		if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			return "", err
		}
		if n, err := c.Read(b); err == nil {
			return string(b[:n]), nil
		}
	}
	return "", fmt.Errorf("no answer to %d bytes", len(word))
}

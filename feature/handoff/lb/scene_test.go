// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// patience bounds the wait for required events. It exceeds pauses of the machine and costs nothing
// otherwise.
const patience = 30 * time.Second

// scene is a client, a load balancer and two hosts with the service's address.
type scene struct {
	middle  *netns.Handle
	devices []string
	client  *netns.Handle
	hosts   [2]*netns.Handle
	f       *DataPath
	served  bool
	mtu     int // of tunnels
}

// newScene connects four namespaces: the client at device c, host i at device h<i>.
func newScene(t *testing.T) *scene { return newSceneBehind(t, false) }

// newSceneBehind is newScene with an optional router before the client, with an MTU of 1300 towards
// it.
func newSceneBehind(t *testing.T, router bool) *scene {
	t.Helper()
	nstest.NeedRoot(t)
	if err := kernel.Require(Needs); err != nil {
		t.Skip("need: kernel", err)
	}
	lb, client := nstest.NewNetns(t), nstest.NewNetns(t)
	var hosts [2]*netns.Handle
	var f *DataPath
	near := client
	if router {
		near = nstest.NewNetns(t)
	}
	nstest.Cable(t, near, "w0", lb, "c")
	nstest.Address(t, near, "w0", prefix("10.1.0.2/24"), prefix("fd01::2/64"))
	nstest.Address(t, lb, "c", prefix("10.1.0.1/24"), prefix("fd01::1/64"))
	route(t, near, "w0", "0.0.0.0/0", "10.1.0.1")
	route(t, near, "w0", "::/0", "fd01::1")
	if router {
		behind(t, client, near)
		route(t, lb, "c", "10.8.0.0/24", "10.1.0.2")
		route(t, lb, "c", "fd08::/64", "fd01::2")
	}
	devices := []string{"c"}
	var servers []Backend
	for i := range hosts {
		name := fmt.Sprint("h", i+1)
		hosts[i] = nstest.NewNetns(t)
		nstest.Cable(t, hosts[i], "w0", lb, name)
		nstest.Address(t, hosts[i], "w0", prefix("10.2.%d.2/24", i), prefix("fd02:%d::2/64", i))
		nstest.Address(t, lb, name, prefix("10.2.%d.1/24", i), prefix("fd02:%d::1/64", i))
		nstest.Address(t, hosts[i], "lo", netip.PrefixFrom(service4.Addr(), 32), netip.PrefixFrom(service6.Addr(), 128))
		route(t, hosts[i], "w0", "0.0.0.0/0", fmt.Sprintf("10.2.%d.1", i))
		route(t, hosts[i], "w0", "::/0", fmt.Sprintf("fd02:%d::1", i))
		devices = append(devices, name)
		servers = append(servers, Backend{Number: move.Backend(i + 1), Name: name, Interface: nstest.Ifindex(t, lb, name), MAC: mac(t, hosts[i]), Weight: 1})
	}
	forward(t, lb)
	do(t, lb, func() (err error) {
		f, err = New(Options{Devices: devices})
		if err != nil {
			return err
		}
		t.Cleanup(f.Close)
		for id, listen := range []netip.AddrPort{service4, service6} {
			if err := f.SetService(Service{ID: id, Listen: listen, Proto: unix.IPPROTO_TCP}); err != nil {
				return err
			}
		}
		return f.SetBackends(servers)
	})
	return &scene{client: client, hosts: hosts, f: f, middle: lb, devices: devices}
}

// behind connects a client to a router with a small MTU towards it.
func behind(t *testing.T, client, router *netns.Handle) {
	t.Helper()
	nstest.Cable(t, client, "w0", router, "n")
	nstest.Address(t, client, "w0", prefix("10.8.0.2/24"), prefix("fd08::2/64"))
	nstest.Address(t, router, "n", prefix("10.8.0.1/24"), prefix("fd08::1/64"))
	route(t, client, "w0", "0.0.0.0/0", "10.8.0.1")
	route(t, client, "w0", "::/0", "fd08::1")
	forward(t, router)
	do(t, router, func() error {
		l, err := netlink.LinkByName("n")
		if err != nil {
			return err
		}
		for _, to := range []netip.Prefix{prefix("10.8.0.2/32"), prefix("fd08::2/128")} {
			dst := &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Bits())}
			if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, MTU: 1300, MTULock: true, Scope: netlink.SCOPE_LINK}); err != nil {
				return err
			}
		}
		return nil
	})
}

func forward(t *testing.T, ns *netns.Handle) {
	t.Helper()
	do(t, ns, func() error {
		for _, f := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/"+f, []byte("1"), 0); err != nil {
				return err
			}
		}
		return nil
	})
}

func do(t *testing.T, ns *netns.Handle, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}

func route(t *testing.T, ns *netns.Handle, device, to, via string) {
	t.Helper()
	_, dst, err := net.ParseCIDR(to)
	if err != nil {
		t.Fatal(err)
	}
	do(t, ns, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Gw: net.ParseIP(via)})
	})
}

func mac(t *testing.T, ns *netns.Handle) (out net.HardwareAddr) {
	t.Helper()
	do(t, ns, func() error {
		l, err := netlink.LinkByName("w0")
		if err == nil {
			out = l.Attrs().HardwareAddr
		}
		return err
	})
	return out
}

// serve echoes at both hosts, with the host's number before each read.
func serve(t *testing.T, hosts [2]*netns.Handle, at netip.AddrPort) {
	t.Helper()
	for i, ns := range hosts {
		serveAt(t, ns, i+1, at)
	}
}

// serveAt is serve at one host.
func serveAt(t *testing.T, ns *netns.Handle, number int, at netip.AddrPort) {
	t.Helper()
	do(t, ns, func() error {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					b := make([]byte, 4096)
					for {
						n, err := c.Read(b)
						if err != nil {
							return
						}
						if _, err := fmt.Fprintf(c, "%d%s", number, b[:n]); err != nil {
							return
						}
					}
				}()
			}
		}()
		return nil
	})
}

func dial(t *testing.T, client *netns.Handle, to netip.AddrPort) net.Conn {
	t.Helper()
	var c net.Conn
	do(t, client, func() (err error) {
		c, err = net.DialTimeout("tcp", to.String(), patience)
		return err
	})
	t.Cleanup(func() { c.Close() })
	return c
}

func keyOfConn(c net.Conn, service int) Key {
	a := c.LocalAddr().(*net.TCPAddr).AddrPort()
	return Key{Client: netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), Service: service}
}

// ask sends a word and returns the answer within a time.
func ask(c net.Conn, word string, wait time.Duration) (string, error) {
	if _, err := io.WriteString(c, word); err != nil {
		return "", err
	}
	if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return "", err
	}
	b := make([]byte, 64)
	n, err := c.Read(b)
	return string(b[:n]), err
}

// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/tunnel"
	"github.com/weir-project/weir/internal/nstest"
)

// Nobody but hosts' ends of tunnels has the load balancer route what comes out of its tunnels' device (CERT VU#199397).
func TestTunnelOfStranger(t *testing.T) {
	for name, lb := range map[string]string{"over IPv4": "10.2.0.1", "over IPv6": "fd02::1"} {
		t.Run(name, func(t *testing.T) {
			sc := newRoutedScene(t, name == "over IPv6")
			victim := nstest.ListenUDP(t, sc.client, netip.MustParseAddrPort("10.1.0.2:9999"))
			stranger := dialUDP(t, sc.client, netip.AddrPortFrom(netip.MustParseAddr(lb), tunnel.Port))
			forged := vxlanOf(netip.MustParseAddr("10.77.0.1"), netip.MustParseAddr("10.1.0.2"), 9999, "forged")
			b := make([]byte, 100)
			for end := time.Now().Add(patience); ; {
				if _, err := stranger.Write(forged); err != nil {
					t.Fatal(err)
				}
				if err := victim.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
					t.Fatal(err)
				}
				if n, from, err := victim.ReadFrom(b); err == nil {
					t.Fatalf("a stranger's tunnel delivers %q, as from %s", b[:n], from)
				}
				c, err := sc.f.Counts()
				if err != nil {
					t.Fatal(err)
				}
				if c.UnknownSource > 0 {
					return
				}
				if time.Now().After(end) {
					t.Fatal("the packets are not counted")
				}
			}
		})
	}
}

// A backend's own end delivers nothing but packets of services' addresses: any user of its host can send to the load balancer's port.
func TestTunnelOfNoService(t *testing.T) {
	for name, ends := range map[string][2]string{"over IPv4": {"10.3.0.2", "10.2.0.1"}, "over IPv6": {"fd03::2", "fd02::1"}} {
		t.Run(name, func(t *testing.T) {
			sc := newRoutedScene(t, name == "over IPv6")
			victim := nstest.ListenUDP(t, sc.client, netip.MustParseAddrPort("10.1.0.2:9999"))
			var user *net.UDPConn
			do(t, sc.hosts[0], func() (err error) {
				user, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(ends[0]), 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(ends[1]), tunnel.Port)))
				return err
			})
			defer user.Close()
			to := netip.MustParseAddr("10.1.0.2")
			for _, forged := range []string{"10.77.0.1", "10.3.0.2", "10.2.0.1"} {
				if _, err := user.Write(vxlanOf(netip.MustParseAddr(forged), to, 9999, "forged")); err != nil {
					t.Fatal(err)
				}
			}
			// What the service's address sends is behind them, in order.
			b := make([]byte, 100)
			for end := time.Now().Add(patience); ; {
				if _, err := user.Write(vxlanOf(service4.Addr(), to, 9999, "service")); err != nil {
					t.Fatal(err)
				}
				if err := victim.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
					t.Fatal(err)
				}
				n, from, err := victim.ReadFromUDPAddrPort(b)
				if err == nil && from.Addr().Unmap() != service4.Addr() {
					t.Fatalf("a user of a backend delivers %q, as from %s", b[:n], from)
				}
				if err == nil {
					break
				}
				if time.Now().After(end) {
					t.Fatal("the service's own packet does not arrive")
				}
			}
			if c, err := sc.f.Counts(); err != nil || c.UnknownSource != 3 {
				t.Errorf("%+v, %v: want 3 dropped", c, err)
			}
			refused(t, sc)
		})
	}
}

// refused wants the backends' errors about a service's packets to reach their client.
func refused(t *testing.T, sc *scene) {
	t.Helper()
	for id, at := range []netip.AddrPort{service4, service6} {
		if err := sc.f.SetService(Service{ID: 2 + id, Listen: at, Proto: unix.IPPROTO_UDP}); err != nil {
			t.Fatal(err)
		}
		c := dialUDP(t, sc.client, at)
		nstest.Eventually(t, func() error {
			_, err := c.Write([]byte("anybody?"))
			if errors.Is(err, unix.ECONNREFUSED) {
				return nil
			}
			return fmt.Errorf("%s: %v: want an error of the backend", at, err)
		})
	}
}

// vxlanOf is a tunnel's packet with a datagram in it, behind the outer UDP header.
func vxlanOf(from, to netip.Addr, port uint16, payload string) []byte {
	b := binary.BigEndian.AppendUint32(nil, 0x08000000) // RFC 7348, 5: a VNI is there
	b = binary.BigEndian.AppendUint32(b, tunnel.VNI<<8)
	b = append(append(b, tunnel.LBMAC...), tunnel.BackendMAC...)
	b = binary.BigEndian.AppendUint16(b, 0x0800)
	udp := 8 + len(payload)
	ip := binary.BigEndian.AppendUint32(nil, 0x45000000|uint32(20+udp))
	ip = append(ip, 0, 1, 0, 0, 64, 17, 0, 0)
	ip = append(append(ip, from.AsSlice()...), to.AsSlice()...)
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	b = append(b, ip...)
	for _, v := range []uint16{40000, port, uint16(udp), 0} {
		b = binary.BigEndian.AppendUint16(b, v)
	}
	return append(b, payload...)
}

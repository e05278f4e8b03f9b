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

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/lb/report"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/tunnel"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// TestTunnelOfStranger checks that only the hosts' ends of tunnels can make the load balancer route
// packets from its tunnels' device (CERT VU#199397).
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

// TestTunnelOfNoService checks that a backend's end delivers only packets from services' addresses.
// Any user of its host can send to the load balancer's port.
func TestTunnelOfNoService(t *testing.T) {
	for name, ends := range map[string][2]string{"over IPv4": {"10.3.0.2", "10.2.0.1"}, "over IPv6": {"fd03::2", "fd02::1"}} {
		t.Run(name, func(t *testing.T) {
			sc := newRoutedScene(t, name == "over IPv6")
			victim := nstest.ListenUDP(t, sc.client, netip.MustParseAddrPort("10.1.0.2:9999"))
			user := userOf(t, sc, ends[0], ends[1])
			to := netip.MustParseAddr("10.1.0.2")
			for _, forged := range []string{"10.77.0.1", "10.3.0.2", "10.2.0.1"} {
				if _, err := user.Write(vxlanOf(netip.MustParseAddr(forged), to, 9999, "forged")); err != nil {
					t.Fatal(err)
				}
			}
			// The service's own packets arrive after them, in order.
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

// refused requires that the backends' errors about a service's packets reach the client.
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

// TestTunnelFills checks that forged packets by a user of a backend's host fill at most half of the
// table, and clients' connections are still learned.
func TestTunnelFills(t *testing.T) {
	sc := newRoutedScene(t, false)
	user := userOf(t, sc, "10.3.0.2", "10.2.0.1")
	most := int(sc.f.maps.LbFlows.MaxEntries()) / 2
	flows := func() (n, unasked int) {
		if err := sc.f.Flows(func(_ Key, fl Flow) bool {
			if n++; fl.Unasked {
				unasked++
			}
			return true
		}); err != nil {
			t.Fatal(err)
		}
		return n, unasked
	}
	seg := make([]byte, 20)
	binary.BigEndian.PutUint16(seg, service4.Port())
	seg[12], seg[13] = 5<<4, tcpACK|tcpPSH
	for i := 0; i < most+most/4; i++ {
		binary.BigEndian.PutUint16(seg[2:], uint16(1024+i&0x7fff))
		if _, err := user.Write(vxlanWith(service4.Addr(), netip.AddrFrom4([4]byte{10, 99, byte(i >> 15), 1}), unix.IPPROTO_TCP, seg)); err != nil {
			t.Fatal(err)
		}
	}
	if n, unasked := flows(); n != most || unasked != n {
		t.Errorf("%d flows, %d of them unasked, want %d", n, unasked, most)
	}
	if c, err := sc.f.Counts(); err != nil || c.Full == 0 {
		t.Errorf("%+v, %v", c, err)
	}
	_, k, owner, _ := session(t, sc)
	becomes(t, sc.f, k, "of its client", func(fl Flow) bool { return fl.Owner == owner && !fl.Unasked })
	for range 2 { // the first one detects their number
		if n, err := sc.f.Forget(time.Second, time.Hour); n != 0 || err != nil {
			t.Errorf("%d flows are forgotten at once, %v", n, err)
		}
	}
}

// TestTunnelRootPorts checks that tunnel packets from unprivileged source ports are noted, and
// dropped only if the file says so. An older backend's device keeps working.
func TestTunnelRootPorts(t *testing.T) {
	for name, ends := range map[string][2]string{"over IPv4": {"10.3.0.2", "10.2.0.1"}, "over IPv6": {"fd03::2", "fd02::1"}} {
		t.Run(name, func(t *testing.T) {
			sc := newRoutedScene(t, name == "over IPv6")
			session(t, sc)
			if report.UsersSend(sc.f.maps.LbUsers, 1) || report.UsersSend(sc.f.maps.LbUsers, 2) {
				t.Error("the backends' own devices count as users")
			}
			victim := nstest.ListenUDP(t, sc.client, netip.MustParseAddrPort("10.1.0.2:9999"))
			user := userOf(t, sc, ends[0], ends[1])
			sends := func() error {
				_, err := user.Write(vxlanOf(service4.Addr(), netip.MustParseAddr("10.1.0.2"), 9999, "user"))
				return err
			}
			b := make([]byte, 100)
			nstest.Eventually(t, func() error {
				return errors.Join(sends(), victim.SetReadDeadline(time.Now().Add(20*time.Millisecond)), func() error { _, err := victim.Read(b); return err }())
			})
			if !report.UsersSend(sc.f.maps.LbUsers, 1) || report.UsersSend(sc.f.maps.LbUsers, 2) {
				t.Error("the backend is not noted, or another one")
			}
			if err := sc.f.maps.LbUsers.Put(uint32(0), uint64(1)); err != nil {
				t.Fatal(err)
			}
			before, err := sc.f.Counts()
			if err != nil {
				t.Fatal(err)
			}
			nstest.Eventually(t, func() error {
				err := sends()
				if c, e := sc.f.Counts(); c.UnknownSource == before.UnknownSource || c.Out > before.Out {
					return fmt.Errorf("%+v, %w", c, errors.Join(e, err, errors.New("want the packet dropped")))
				}
				return nil
			})
			session(t, sc) // the devices' own ports still work
		})
	}
}

// TestForgetUnasked checks that a few flows known by backends' packets alone stay, and many are
// forgotten soon.
func TestForgetUnasked(t *testing.T) {
	room := 1 << 18 / 8
	for n, want := range map[int]int{room: 0, room + 1: room + 1} {
		f := newTable(t, n)
		if err := f.Flows(func(k Key, _ Flow) bool {
			v := bpf.LBLbFlow{Word: 1, Seen: kernel.Monotonic() - uint64(unanswered), Out: 1, Flags: flow.Unasked}
			return f.maps.LbFlows.Put(k.Raw(), &v) == nil
		}); err != nil {
			t.Fatal(err)
		}
		if gone, err := f.Forget(time.Second, time.Hour); gone != 0 || err != nil {
			t.Errorf("of %d flows %d are forgotten before they are counted, %v", n, gone, err)
		}
		if gone, err := f.Forget(time.Second, time.Hour); gone != want || err != nil {
			t.Errorf("of %d flows %d are forgotten, want %d: %v", n, gone, want, err)
		}
	}
}

// TestLearnedOfBackend checks that a load balancer learns a forgotten connection from its server's
// packet. Then its client or its backend's agent confirms it.
func TestLearnedOfBackend(t *testing.T) {
	sc := newScene(t)
	const owner = move.Backend(1)
	k := Key{Client: netip.MustParseAddrPort("10.1.0.2:5555")} // it resets all packets
	speaks := func() {
		t.Helper()
		segment := make([]byte, 20)
		binary.BigEndian.PutUint16(segment, service4.Port())
		binary.BigEndian.PutUint16(segment[2:], k.Client.Port())
		segment[12], segment[13] = 5<<4, tcpACK|tcpPSH
		raw(t, sc.hosts[owner-1], ipOf(service4.Addr(), k.Client.Addr(), unix.IPPROTO_TCP, segment), k.Client.Addr())
		becomes(t, sc.f, k, "unasked", func(fl Flow) bool { return fl.Owner == owner && fl.Unasked })
	}
	count := func() int64 {
		var u bpf.LBLbUnasked
		if err := sc.f.maps.LbRoom.Lookup(uint32(0), &u); err != nil {
			t.Fatal(err)
		}
		return u.Flows
	}
	speaks()
	forge(t, sc, k.Client, service4, tcpSYN)
	forge(t, sc, k.Client, service4, tcpRST)
	becomes(t, sc.f, k, "reset", func(fl Flow) bool { return fl.In >= 2 })
	if fl, err := sc.f.Flow(k); err != nil || !fl.Unasked || count() != 1 {
		t.Errorf("%+v, %v: a SYN and a reset confirm nothing", fl, err)
	}
	forge(t, sc, k.Client, service4, tcpACK)
	becomes(t, sc.f, k, "confirmed", func(fl Flow) bool { return fl.Owner == owner && !fl.Unasked })
	if err := sc.f.maps.LbFlows.Delete(k.Raw()); err != nil {
		t.Fatal(err)
	}
	speaks()
	if _, err := sc.f.Change(k, func(fl *Flow) { fl.Named = true }); err != nil {
		t.Fatal(err)
	}
	if fl, err := sc.f.Flow(k); err != nil || fl.Unasked || count() != 0 {
		t.Errorf("%+v, %v, %d unasked: its agent has told of it", fl, err, count())
	}
}

// userOf returns a socket of a user on the first backend's host.
func userOf(t *testing.T, sc *scene, from, lb string) (c *net.UDPConn) {
	t.Helper()
	at := func(a string, port uint16) *net.UDPAddr {
		return net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(a), port))
	}
	do(t, sc.hosts[0], func() (err error) {
		c, err = net.DialUDP("udp", at(from, 0), at(lb, tunnel.Port))
		return err
	})
	t.Cleanup(func() { c.Close() })
	return c
}

// raw sends a raw packet.
func raw(t *testing.T, ns *netns.Handle, packet []byte, to netip.Addr) {
	t.Helper()
	do(t, ns, func() error {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		return unix.Sendto(s, packet, 0, &unix.SockaddrInet4{Addr: to.As4()})
	})
}

// vxlanOf returns a VXLAN payload with a datagram inside.
func vxlanOf(from, to netip.Addr, port uint16, payload string) []byte {
	var b []byte
	for _, v := range []uint16{40000, port, uint16(8 + len(payload)), 0} {
		b = binary.BigEndian.AppendUint16(b, v)
	}
	return vxlanWith(from, to, unix.IPPROTO_UDP, append(b, payload...))
}

// vxlanWith returns a VXLAN payload with any packet inside.
func vxlanWith(from, to netip.Addr, proto byte, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, 0x08000000) // RFC 7348, 5: the VNI is valid
	b = binary.BigEndian.AppendUint32(b, tunnel.VNI<<8)
	b = append(append(b, tunnel.LBMAC...), tunnel.BackendMAC...)
	b = binary.BigEndian.AppendUint16(b, 0x0800)
	return append(b, ipOf(from, to, proto, payload)...)
}

// ipOf returns an IPv4 packet.
func ipOf(from, to netip.Addr, proto byte, payload []byte) []byte {
	ip := binary.BigEndian.AppendUint32(nil, 0x45000000|uint32(20+len(payload)))
	ip = append(ip, 0, 1, 0, 0, 64, proto, 0, 0)
	ip = append(append(ip, from.AsSlice()...), to.AsSlice()...)
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	return append(ip, payload...)
}

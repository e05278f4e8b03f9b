// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
)

// tagged sends a segment with a VLAN tag from a namespace's device w0.
func (s segment) tagged(t *testing.T, ns *netns.Handle, to net.HardwareAddr, tag uint16, src, dst netip.AddrPort) {
	t.Helper()
	do(t, ns, func() error {
		l, err := netlink.LinkByName("w0")
		if err != nil {
			return err
		}
		raw, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(raw)
		b := append(append([]byte(nil), to...), l.Attrs().HardwareAddr...)
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_8021Q)
		b = binary.BigEndian.AppendUint16(b, tag)
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IP)
		return unix.Sendto(raw, append(b, s.packet(src, dst)...), 0, &unix.SockaddrLinklayer{Ifindex: l.Attrs().Index})
	})
}

// TestFlooded checks that frames for other MAC addresses are left alone. A switch floods frames for
// a dead backend, and a pair of load balancers sent these to each other for ever.
func TestFlooded(t *testing.T) {
	sc := newScene(t)
	sc.nobody(t, netip.MustParseAddr("10.1.0.77"))
	const untagged = 0
	backend := mac(t, sc.hosts[0])
	for name, to := range map[string]net.HardwareAddr{
		"a backend": backend[:],
		"everybody": {0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
		"a group":   {1, 0, 0x5e, 0, 0, 1},
	} {
		before, err := sc.f.Counts()
		if err != nil {
			t.Fatal(err)
		}
		first, second := netip.MustParseAddrPort("10.1.0.77:1"), netip.MustParseAddrPort("10.1.0.77:2")
		segment{flags: tcpSYN}.tagged(t, sc.client, to, untagged, first, service4)
		segment{flags: tcpSYN}.tagged(t, sc.client, macOf(t, sc.middle, "c"), untagged, second, service4) // after it, on the same device
		becomes(t, sc.f, Key{Client: second}, "known by the frame for the load balancer", func(Flow) bool { return true })
		if fl, err := sc.f.Flow(Key{Client: first}); !errors.Is(err, errNoFlow) {
			t.Errorf("by a frame for %s: %+v, %v", name, fl, err)
		}
		after, err := sc.f.Counts()
		if err != nil || after.In != before.In+1 {
			t.Errorf("after a frame for %s: %+v, %v: before %+v", name, after, err, before)
		}
		if err := sc.f.maps.LbFlows.Delete(Key{Client: second}.Raw()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTagged checks that packets of a VLAN are left to the VLAN's device, from clients and
// backends. They are neither learned nor forwarded. A priority tag changes nothing.
func TestTagged(t *testing.T) {
	sc := newScene(t)
	sc.nobody(t, netip.MustParseAddr("10.1.0.77"))
	near := func(device string) net.HardwareAddr { return macOf(t, sc.middle, device) }
	const vlan, priority = 3<<13 | 7, 3 << 13
	client := func(port uint16) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr("10.1.0.77"), port)
	}
	for name, send := range map[string]func(tag uint16, client netip.AddrPort){
		"a client": func(tag uint16, client netip.AddrPort) {
			segment{flags: tcpSYN}.tagged(t, sc.client, near("c"), tag, client, service4)
		},
		"a backend": func(tag uint16, client netip.AddrPort) {
			segment{flags: tcpSYN | tcpACK}.tagged(t, sc.hosts[0], near("h1"), tag, service4, client)
		},
	} {
		before, err := sc.f.Counts()
		if err != nil {
			t.Fatal(err)
		}
		send(vlan, client(1))
		send(priority, client(2)) // after the former, on the same device
		becomes(t, sc.f, Key{Client: client(2)}, fmt.Sprintf("known by the priority of %s", name), func(Flow) bool { return true })
		if fl, err := sc.f.Flow(Key{Client: client(1)}); !errors.Is(err, errNoFlow) {
			t.Errorf("of a VLAN, by %s: %+v, %v", name, fl, err)
		}
		after, err := sc.f.Counts()
		if err != nil || after.Learned != before.Learned+1 || after.In+after.Out != before.In+before.Out+1 || after.UnknownSource != before.UnknownSource {
			t.Errorf("by %s: %+v, %v: before %+v", name, after, err, before)
		}
		if err := sc.f.maps.LbFlows.Delete(Key{Client: client(2)}.Raw()); err != nil {
			t.Fatal(err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package neigh

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"

	"github.com/vishvananda/netlink"
	nd "golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
)

// Told is a link address announced by a neighbour.
type Told struct {
	Key Key
	MAC net.HardwareAddr // nil: the neighbour answered at the asked address
}

// Ears receives the announcements of neighbours and sends questions.
type Ears struct {
	arp   *os.File
	all   *nd.PacketConn // neighbour discovery
	ended []chan struct{}
}

// Listen opens the sockets of a namespace. Announcements go to out until Close.
func Listen(ns *netns.Handle, out chan<- Told) (e *Ears, err error) {
	e = &Ears{}
	var c net.PacketConn
	err = ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(Network(unix.ETH_P_ARP)))
		if err != nil {
			return err
		}
		e.arp = os.NewFile(uintptr(fd), "ARP")
		c, err = net.ListenPacket("ip6:ipv6-icmp", "::")
		return err
	})
	if err != nil {
		e.Close()
		return nil, err
	}
	e.all = nd.NewPacketConn(c)
	var pass nd.ICMPFilter
	pass.SetAll(true)
	pass.Accept(nd.ICMPTypeNeighborSolicitation)
	pass.Accept(nd.ICMPTypeNeighborAdvertisement)
	err = errors.Join(e.all.SetICMPFilter(&pass), e.all.SetControlMessage(nd.FlagInterface|nd.FlagHopLimit, true), e.all.SetMulticastHopLimit(255), e.all.SetHopLimit(255))
	if err != nil {
		e.Close()
		return nil, err
	}
	for _, hear := range []func(chan<- Told){e.hearARP, e.hearND} {
		ended := make(chan struct{})
		e.ended = append(e.ended, ended)
		go func() {
			defer close(ended)
			hear(out)
		}()
	}
	return e, nil
}

// Close closes the sockets and waits for the readers.
func (e *Ears) Close() {
	if e.arp != nil {
		e.arp.Close()
	}
	if e.all != nil {
		e.all.Close()
	}
	for _, ended := range e.ended {
		<-ended
	}
}

// Network converts a number to network byte order on little-endian hosts.
func Network(n uint16) uint16 { return n<<8 | n>>8 }

// deliver sends without blocking. If out is full the announcement is dropped; the neighbour is asked again.
func deliver(out chan<- Told, t Told) {
	select {
	case out <- t:
	default:
	}
}

// ARP is an ARP packet for IPv4 over Ethernet, without the link header.
type ARP struct {
	Kind, Proto uint16
	Len, PLen   uint8
	Op          uint16
	SHA         [6]byte
	SPA         [4]byte
	THA         [6]byte
	TPA         [4]byte
}

func (e *Ears) hearARP(out chan<- Told) {
	b := make([]byte, 128)
	c, err := e.arp.SyscallConn()
	if err != nil {
		return
	}
	for {
		var n int
		var from unix.Sockaddr
		var bad error
		if err := c.Read(func(fd uintptr) bool {
			n, from, bad = unix.Recvfrom(int(fd), b, 0)
			return !errors.Is(bad, unix.EAGAIN)
		}); err != nil {
			return // closed
		}
		at, ok := from.(*unix.SockaddrLinklayer)
		if bad != nil || !ok || at.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		var p ARP
		if _, err := binary.Decode(b[:n], binary.BigEndian, &p); err != nil || p.Kind != 1 || p.Proto != unix.ETH_P_IP || p.Len != 6 || p.PLen != 4 || p.SHA[0]&1 != 0 || p.SHA == [6]byte{} {
			continue
		}
		deliver(out, Told{NewKey(at.Ifindex, netip.AddrFrom4(p.SPA)), bytes.Clone(p.SHA[:])})
	}
}

// Neighbour solicitation and advertisement: RFC 4861 sections 4.3, 4.4 and 4.6.1.
const (
	ndLen         = 24
	ndSource      = 1
	ndTarget      = 2
	ndAdvertises  = 136
	ndSolicits    = 135
	ndOptionUnit  = 8
	ndLinkAddress = 2 + 6
)

func (e *Ears) hearND(out chan<- Told) {
	b := make([]byte, 1500)
	for {
		n, m, from, err := e.all.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || m == nil || m.HopLimit != 255 || n < ndLen || b[1] != 0 {
			continue
		}
		option, addr := byte(ndTarget), netip.AddrFrom16([16]byte(b[8:24]))
		if b[0] == ndSolicits {
			a, ok := from.(*net.IPAddr)
			if !ok {
				continue
			}
			option = ndSource
			addr, _ = netip.AddrFromSlice(a.IP)
		}
		t := Told{Key: NewKey(m.IfIndex, addr), MAC: linkAddress(b[ndLen:n], option)}
		if t.MAC != nil || b[0] == ndAdvertises {
			deliver(out, t)
		}
	}
}

// linkAddress returns the link address of an option, or nil.
func linkAddress(b []byte, option byte) net.HardwareAddr {
	for len(b) >= ndOptionUnit {
		size := int(b[1]) * ndOptionUnit
		if size == 0 || size > len(b) {
			return nil
		}
		if b[0] == option && size == ndLinkAddress && b[2]&1 == 0 {
			return bytes.Clone(b[2:8])
		}
		b = b[size:]
	}
	return nil
}

// Ask asks a neighbour for its link address, at its previous address or on the whole link. It runs in the namespace.
func (e *Ears) Ask(k Key, had net.HardwareAddr, everybody bool) error {
	l, err := netlink.LinkByIndex(int(k.Ifindex))
	if err != nil {
		return err
	}
	own := l.Attrs().HardwareAddr
	if k.IPv6 == 0 {
		from, err := sourceFor(k)
		if err != nil {
			return err
		}
		p := ARP{Kind: 1, Proto: unix.ETH_P_IP, Len: 6, PLen: 4, Op: 1, SHA: [6]byte(own), SPA: from.As4(), TPA: k.Addr().As4()}
		to := &unix.SockaddrLinklayer{Protocol: Network(unix.ETH_P_ARP), Ifindex: int(k.Ifindex), Halen: 6, Addr: [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}}
		if !everybody {
			copy(to.Addr[:], had)
		}
		b, err := binary.Append(nil, binary.BigEndian, p)
		if err != nil {
			return err
		}
		c, err := e.arp.SyscallConn()
		if err != nil {
			return err
		}
		var bad error
		return errors.Join(c.Control(func(fd uintptr) { bad = unix.Sendto(int(fd), b, 0, to) }), bad)
	}
	b := make([]byte, ndLen, ndLen+ndLinkAddress)
	b[0] = ndSolicits
	copy(b[8:], k.Bytes[:])
	b = append(append(b, ndSource, 1), own...)
	to := k.Addr()
	if everybody { // the solicited-node multicast address: RFC 4291 section 2.7.1
		a := netip.MustParseAddr("ff02::1:ff00:0").As16()
		copy(a[13:], k.Bytes[13:])
		to = netip.AddrFrom16(a)
	}
	dst := &net.IPAddr{IP: to.AsSlice()}
	if to.IsLinkLocalUnicast() || everybody {
		dst.Zone = strconv.Itoa(int(k.Ifindex)) // package net caches interface names across namespaces, so use the index
	}
	_, err = e.all.WriteTo(b, &nd.ControlMessage{IfIndex: int(k.Ifindex), HopLimit: 255}, dst)
	return err
}

// sourceFor returns this host's IPv4 address on the neighbour's link.
func sourceFor(k Key) (netip.Addr, error) {
	found, err := netlink.RouteGetWithOptions(k.Addr().AsSlice(), &netlink.RouteGetOptions{OifIndex: int(k.Ifindex)})
	if err == nil && len(found) > 0 {
		if a, ok := netip.AddrFromSlice(found[0].Src.To4()); ok {
			return a, nil
		}
	}
	return netip.Addr{}, errors.Join(err, fmt.Errorf("no address to ask %s from", k.Addr()))
}

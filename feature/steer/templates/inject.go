// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// The mark of a replay: TEMPLATES_REPLAY_*.
const (
	replayID    = 0x7765
	replayLabel = 0x77656
	replayTTL   = 255
)

// maxInjected is the maximum packet of BPF_PROG_TEST_RUN: a page without the kernel's own data.
const maxInjected = 3400

// injector delivers datagrams with a foreign source address to sockets of its namespace. It injects them into the
// receive path of the interface that the sender's packets arrive on. Filters, rp_filter and steering see no difference.
// Without such an interface it uses loopback. All methods run in [netns.Handle.Do].
type injector struct {
	c     *kernel.Collection
	Raw   map[bool]int // raw sockets, by "IPv4"
	links map[uint32]netlink.Link
}

func newInjector() (*injector, error) {
	spec, err := bpf.LoadInject()
	if err != nil {
		return nil, err
	}
	in := &injector{Raw: map[bool]int{}, links: map[uint32]netlink.Link{}}
	if in.c, err = kernel.Load(spec, []string{bpf.InjectProgInject}, nil); err != nil {
		return nil, err
	}
	for _, v4 := range []bool{true, false} {
		domain := unix.AF_INET6
		if v4 {
			domain = unix.AF_INET
		}
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue // a host without IPv6
		} else if err != nil {
			in.Close()
			return nil, fmt.Errorf("open raw socket: %w", users.Lacking(err, unix.CAP_NET_RAW))
		}
		in.Raw[v4] = fd
	}
	return in, nil
}

func (in *injector) Close() {
	for _, fd := range in.Raw {
		unix.Close(fd)
	}
	in.c.Close()
}

// forget makes the next send read the interfaces again.
func (in *injector) forget() { clear(in.links) }

// link returns the interface to inject at, or nil for loopback.
func (in *injector) link(index uint32) netlink.Link {
	l, known := in.links[index]
	if known {
		return l
	}
	l, err := netlink.LinkByIndex(int(index))
	// On loopback, the kernel accepts a packet from a local address only with the route attached when it was sent.
	if err != nil || l.Attrs().Flags&net.FlagLoopback != 0 || l.Attrs().Flags&net.FlagUp == 0 {
		l = nil
	}
	in.links[index] = l
	return l
}

// limit returns the maximum payload for an interface.
func (in *injector) limit(index uint32) int {
	mtu := 1500
	if l := in.link(index); l != nil {
		mtu = min(mtu, l.Attrs().MTU)
	}
	return max(mtu, 576) - 48
}

// send delivers one datagram.
func (in *injector) send(from, to netip.AddrPort, index uint32, payload []byte) error {
	packet := udpPacket(from, to, payload)
	l := in.link(index)
	if l == nil || len(packet) > maxInjected {
		return in.sendRaw(to.Addr(), packet)
	}
	return in.receive(l, from.Addr().Is4(), packet)
}

// skbContext is the head of struct __sk_buff. The program reads cb[0].
type skbContext struct {
	_  [12]uint32
	CB [5]uint32
}

// receive injects a packet into an interface's receive path.
func (in *injector) receive(l netlink.Link, v4 bool, packet []byte) error {
	ethertype := uint16(unix.ETH_P_IPV6)
	if v4 {
		ethertype = unix.ETH_P_IP
	}
	frame := make([]byte, 12, 14+len(packet))
	copy(frame, l.Attrs().HardwareAddr) // destination; interfaces without addresses drop the header
	frame[6] = 2                        // source: an unused locally administered address
	frame = append(binary.BigEndian.AppendUint16(frame, ethertype), packet...)
	ret, err := in.c.Programs[bpf.InjectProgInject].Run(&ebpf.RunOptions{Data: frame, Context: skbContext{CB: [5]uint32{uint32(l.Attrs().Index)}}})
	if err != nil {
		return fmt.Errorf("inject at %s: %w", l.Attrs().Name, err)
	}
	switch n := int32(ret); {
	case n < 0:
		return fmt.Errorf("inject at %s: %w", l.Attrs().Name, unix.Errno(-n))
	case n > 0: // NET_RX_DROP: the CPU's queue of received packets is full
		return fmt.Errorf("inject at %s: %w", l.Attrs().Name, unix.ENOBUFS)
	}
	return nil
}

// sendRaw sends a packet to an address of this host over loopback. It carries the output route, so no source filter
// applies.
func (in *injector) sendRaw(to netip.Addr, packet []byte) error {
	fd, ok := in.Raw[to.Is4()]
	if !ok {
		return unix.EAFNOSUPPORT
	}
	var sa unix.Sockaddr = &unix.SockaddrInet6{Addr: to.As16()}
	if to.Is4() {
		sa = &unix.SockaddrInet4{Addr: to.As4()}
	}
	if err := unix.Sendto(fd, packet, 0, sa); err != nil {
		return fmt.Errorf("send replay to %s: %w", to, err)
	}
	return nil
}

// udpPacket returns an IP packet (RFC 791, RFC 8200) with a UDP datagram (RFC 768), marked as a replay, with correct
// checksums.
func udpPacket(from, to netip.AddrPort, payload []byte) []byte {
	be := binary.BigEndian
	udp := be.AppendUint16(nil, from.Port())
	udp = be.AppendUint16(udp, to.Port())
	udp = be.AppendUint16(udp, uint16(8+len(payload)))
	udp = be.AppendUint16(udp, 0)
	udp = append(udp, payload...)
	src, dst := from.Addr().AsSlice(), to.Addr().AsSlice()
	sum := addSum(addSum(addSum(unix.IPPROTO_UDP+uint32(len(udp)), src), dst), udp)
	check := ^foldSum(sum)
	if check == 0 {
		check = 0xffff // zero would mean no checksum
	}
	be.PutUint16(udp[6:], check)
	if from.Addr().Is6() {
		b := be.AppendUint32(nil, 6<<28|replayLabel)
		b = be.AppendUint16(b, uint16(len(udp)))
		b = append(b, unix.IPPROTO_UDP, replayTTL)
		return append(append(append(b, src...), dst...), udp...)
	}
	b := []byte{0x45, 0}
	b = be.AppendUint16(b, uint16(20+len(udp)))
	b = be.AppendUint16(b, replayID)
	b = be.AppendUint16(b, 0x4000) // do not fragment
	b = append(b, replayTTL, unix.IPPROTO_UDP, 0, 0)
	b = append(append(b, src...), dst...)
	be.PutUint16(b[10:], ^foldSum(addSum(0, b)))
	return append(b, udp...)
}

// addSum adds b, as words of 16 bits in network order, to sum (RFC 1071).
func addSum(sum uint32, b []byte) uint32 {
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	return sum
}

func foldSum(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// tail sends what the peer has not acknowledged again, when a session starts. It does so by a raw socket, since the session's own
// socket has all of it as sent: where it did not, it would drop every packet that acknowledges the rest, with the data in it, and such
// packets come between Build and Start wherever whoever routes them is quicker than Start.
type tail struct {
	fd   int // in the session's network namespace
	to   unix.Sockaddr
	size int // bytes of a segment
	tos  uint8
	ttl  uint8
}

// maxTail is how many segments are sent again. Of a session that has more under way the peer is asked what it has.
const maxTail = 8

// openTail prepares that, where there is something to send again. Without it the peer is asked what it has. So it is where packets
// may be encrypted on their way out (IPsec): the kernel finds a raw socket's policy without the ports, and before Linux 6.4 without
// the protocol, and what a policy would have encrypted must not leave in clear.
func (b *Built) openTail() error {
	s := b.state
	sent := len(s.Send) - s.Unsent
	if !b.o.Probe || sent == 0 {
		return nil
	}
	i, err := tcpInfo(b.fd)
	if err != nil {
		return err
	}
	size := int(i.SndMSS)
	if s.Timestamps { // the kernel counts them in only once it sends, where new connections here would have none
		size = min(size, int(s.MSS)-12)
	}
	if size <= 0 || sent > maxTail*size || policed(b.fd) {
		return nil
	}
	b.tail, err = newTail(b.fd, s, size)
	if err != nil { // a session without it beats none
		b.Lost = append(b.Lost, fmt.Sprintf("what was sent last is not sent again, and may come after some seconds should it be lost: a raw socket (which takes CAP_NET_RAW): %v", err))
	}
	return nil
}

// newTail opens a raw socket whose packets go the way of the session's.
func newTail(session int, s *State, size int) (_ *tail, err error) {
	f := s.Flow()
	domain, level, tos, ttl, recvErr := unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, unix.IPV6_UNICAST_HOPS, unix.IPV6_RECVERR
	if f.Local.Addr().Is4() {
		domain, level, tos, ttl, recvErr = unix.AF_INET, unix.IPPROTO_IP, unix.IP_TOS, unix.IP_TTL, unix.IP_RECVERR
	}
	t := &tail{size: size}
	// Of this protocol a socket takes packets with their headers, and receives none.
	if t.fd, err = unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			unix.Close(t.fd)
		}
	}()
	for _, o := range []struct {
		opt int
		v   *uint8
	}{{tos, &t.tos}, {ttl, &t.ttl}} {
		v, err := unix.GetsockoptInt(session, level, o.opt)
		if err != nil {
			return nil, err
		}
		*o.v = uint8(v)
	}
	if s.Device != "" {
		if err := unix.BindToDevice(t.fd, s.Device); err != nil {
			return nil, err
		}
	}
	mark, err := unix.GetsockoptInt(session, unix.SOL_SOCKET, unix.SO_MARK)
	if err == nil && mark != 0 {
		err = setInt(t.fd, unix.SOL_SOCKET, unix.SO_MARK, mark)
	}
	if err != nil {
		return nil, err
	}
	if t.to, err = sockaddr(session, s, netip.AddrPortFrom(f.Remote.Addr(), 0)); err != nil {
		return nil, err
	}
	// Policy routing asks for the source.
	from, err := sockaddr(session, s, netip.AddrPortFrom(f.Local.Addr(), 0))
	if err == nil {
		err = unix.Bind(t.fd, from)
	}
	if errors.Is(err, unix.EADDRNOTAVAIL) { // IP_TRANSPARENT, IP_FREEBIND: the headers have it all the same
		err = nil
	}
	if err == nil { // a queue that is full is an error then
		err = setInt(t.fd, level, recvErr, 1)
	}
	if err != nil {
		return nil, err
	}
	return t, nil
}

// policed says whether the network namespace of a socket, which is the calling thread's, has policies of IPsec. It is looked at once
// a second.
func policed(fd int) bool {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	known := err == nil // Linux 5.14
	policies.Lock()
	defer policies.Unlock()
	if p, ok := policies.of[cookie]; ok && known && time.Since(p.at) < time.Second {
		return p.any
	}
	all, err := netlink.XfrmPolicyList(netlink.FAMILY_ALL)
	some := len(all) > 0 || err != nil && !errors.Is(err, unix.EPROTONOSUPPORT) // a kernel without IPsec
	if known {
		if len(policies.of) >= 16 {
			clear(policies.of)
		}
		policies.of[cookie] = policy{some, time.Now()}
	}
	return some
}

type policy struct {
	any bool
	at  time.Time
}

var policies = struct {
	sync.Mutex
	of map[uint64]policy // by the cookie of a network namespace
}{of: map[uint64]policy{}}

func (t *tail) close() { unix.Close(t.fd) }

// send sends it: sequence numbers, windows and options are those of the state, the timestamp is the session's own.
func (t *tail) send(session int, s *State) error {
	f := s.Flow()
	tcp := layers.TCP{SrcPort: layers.TCPPort(f.Local.Port()), DstPort: layers.TCPPort(f.Remote.Port()), Seq: s.SndUna, Ack: s.RcvNxt,
		ACK: true, PSH: true, Window: s.announced()}
	if s.Timestamps {
		var now uint32
		if err := getTCP(session, unix.TCP_TIMESTAMP, &now); err != nil {
			return fmt.Errorf("TCP_TIMESTAMP: %w", err)
		}
		// The kernel begins with an echo of 0, too: it does not tell what the peer sent last.
		v := binary.BigEndian.AppendUint32(make([]byte, 0, 8), now)
		tcp.Options = []layers.TCPOption{{OptionType: layers.TCPOptionKindNop}, {OptionType: layers.TCPOptionKindNop},
			{OptionType: layers.TCPOptionKindTimestamps, OptionLength: 10, OptionData: v[:8]}}
	}
	var ip gopacket.SerializableLayer
	if f.Local.Addr().Is4() {
		v4 := &layers.IPv4{Version: 4, TOS: t.tos, TTL: t.ttl, Flags: layers.IPv4DontFragment, Protocol: layers.IPProtocolTCP,
			SrcIP: f.Local.Addr().AsSlice(), DstIP: f.Remote.Addr().AsSlice()}
		ip = v4
		_ = tcp.SetNetworkLayerForChecksum(v4)
	} else {
		v6 := &layers.IPv6{Version: 6, TrafficClass: t.tos, HopLimit: t.ttl, NextHeader: layers.IPProtocolTCP,
			SrcIP: f.Local.Addr().AsSlice(), DstIP: f.Remote.Addr().AsSlice()}
		ip = v6
		_ = tcp.SetNetworkLayerForChecksum(v6)
	}
	packet := gopacket.NewSerializeBuffer()
	for rest := s.Send[:len(s.Send)-s.Unsent]; len(rest) > 0; {
		n := min(len(rest), t.size)
		o := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
		if err := gopacket.SerializeLayers(packet, o, ip, &tcp, gopacket.Payload(rest[:n])); err != nil {
			return err
		}
		if err := unix.Sendto(t.fd, packet.Bytes(), unix.MSG_DONTWAIT, t.to); err != nil {
			return err
		}
		rest = rest[n:]
		tcp.Seq += uint32(n)
	}
	return nil
}

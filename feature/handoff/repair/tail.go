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

// tail retransmits unacknowledged data when a session starts. It uses a raw socket, because the session's own socket
// has the data marked as sent. With the data unsent, the socket would drop every packet that acknowledges it,
// together with its payload. Such packets arrive between Build and Start if routing is faster than Start.
type tail struct {
	fd   int // in the session's network namespace
	to   unix.Sockaddr
	size int // bytes of a segment
	tos  uint8
	ttl  uint8
}

// maxTail is the maximum of retransmitted segments. Sessions with more in flight send a probe.
const maxTail = 8

// openTail prepares the retransmission, if there is data to retransmit. Otherwise the session sends a probe. It does
// so too if IPsec may encrypt its packets. For a raw socket the kernel selects a policy without the ports, and before
// Linux 6.4 without the protocol. Data to be encrypted must not leave in clear text.
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
	if s.Timestamps { // the kernel counts them only while sending, if its default is no timestamps
		size = min(size, int(s.MSS)-12)
	}
	if size <= 0 || sent > maxTail*size || policed(b.fd) {
		return nil
	}
	b.tail, err = newTail(b.fd, s, size)
	if err != nil { // a session without it beats none
		b.Lost = append(b.Lost, fmt.Sprintf("the last data is not retransmitted at once, and a loss may take seconds to repair: open a raw socket (needs CAP_NET_RAW): %v", err))
	}
	return nil
}

// newTail opens a raw socket with the session's routing.
func newTail(session int, s *State, size int) (_ *tail, err error) {
	f := s.Flow()
	domain, level, tos, ttl, recvErr := unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, unix.IPV6_UNICAST_HOPS, unix.IPV6_RECVERR
	if f.Local.Addr().Is4() {
		domain, level, tos, ttl, recvErr = unix.AF_INET, unix.IPPROTO_IP, unix.IP_TOS, unix.IP_TTL, unix.IP_RECVERR
	}
	t := &tail{size: size}
	// A socket of this protocol sends packets with given headers, and receives none.
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
	// Policy routing depends on the source.
	from, err := sockaddr(session, s, netip.AddrPortFrom(f.Local.Addr(), 0))
	if err == nil {
		err = unix.Bind(t.fd, from)
	}
	if errors.Is(err, unix.EADDRNOTAVAIL) { // IP_TRANSPARENT, IP_FREEBIND: the headers contain the address anyway
		err = nil
	}
	if err == nil { // makes a full queue an error
		err = setInt(t.fd, level, recvErr, 1)
	}
	if err != nil {
		return nil, err
	}
	return t, nil
}

// policed reports whether the socket's network namespace, which is the calling thread's, has IPsec policies. Results
// are cached for one second.
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
	of map[uint64]policy // key: cookie of a network namespace
}{of: map[uint64]policy{}}

func (t *tail) close() { unix.Close(t.fd) }

// send sends the segments. Sequence numbers, window and options are the state's; the timestamp is the session's.
func (t *tail) send(session int, s *State) error {
	f := s.Flow()
	tcp := layers.TCP{SrcPort: layers.TCPPort(f.Local.Port()), DstPort: layers.TCPPort(f.Remote.Port()), Seq: s.SndUna, Ack: s.RcvNxt,
		ACK: true, PSH: true, Window: s.announced()}
	if s.Timestamps {
		var now uint32
		if err := getTCP(session, unix.TCP_TIMESTAMP, &now); err != nil {
			return fmt.Errorf("TCP_TIMESTAMP: %w", err)
		}
		// The kernel also starts with an echo of 0: the peer's last timestamp is not readable.
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

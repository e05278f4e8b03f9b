// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// Explainer is implemented by features that decide about arriving packets. It describes their decision about one packet,
// without counting or charging it.
type Explainer interface {
	Explain(ctx context.Context, r *kernel.Root, p Packet) ([]Verdict, error)
}

// Deliverer is implemented by the feature that knows the receiving socket of an arriving packet.
type Deliverer interface {
	// Deliver explains the socket lookup of a packet for this host. every is set for broadcast and multicast: the kernel
	// delivers the packet to each socket bound to its address.
	Deliver(ctx context.Context, r *kernel.Root, p Packet, every bool) (*Explanation, error)
}

// Packet is the subject of an explanation: an arriving datagram or a connection attempt.
type Packet struct {
	Proto     string         `json:"proto"` // udp or tcp
	From, To  netip.AddrPort `json:"-"`
	Netns     string         `json:"-"` // namespace of arrival; empty: weir's own
	Inode     uint64         `json:"-"` // inode of the namespace, set by host
	Interface string         `json:"-"` // interface of arrival, set by host
}

// ErrPacket is returned for an impossible packet.
var ErrPacket = errors.New("invalid packet")

// Check returns an error that wraps ErrPacket.
func (p Packet) Check() error {
	switch {
	case p.Proto != "udp" && p.Proto != "tcp":
		return fmt.Errorf("%w: protocol %q: want udp or tcp", ErrPacket, p.Proto)
	case p.From.Addr().Is4() != p.To.Addr().Is4():
		return fmt.Errorf("%w: %s and %s are of different families", ErrPacket, p.From.Addr(), p.To.Addr())
	}
	return nil
}

// OpenNetns opens the namespace of the packet's arrival. The caller closes it.
func (p Packet) OpenNetns() (*netns.Handle, error) {
	return netns.Open(p.Netns)
}

// Number returns the packet's protocol number in the IP header.
func (p Packet) Number() uint8 {
	if p.Proto == "tcp" {
		return unix.IPPROTO_TCP
	}
	return unix.IPPROTO_UDP
}

// Family returns AF_INET or AF_INET6.
func (p Packet) Family() uint8 {
	if p.To.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// FramePayload is the payload of a datagram made by Frame.
const FramePayload = "weir"

// Frame returns the packet with an Ethernet header: a datagram of four bytes, or a SYN without options; TTL 64, other
// fields 0.
func (p Packet) Frame() ([]byte, error) {
	type network interface {
		gopacket.SerializableLayer
		gopacket.NetworkLayer
	}
	eth := &layers.Ethernet{SrcMAC: make([]byte, 6), DstMAC: make([]byte, 6), EthernetType: layers.EthernetTypeIPv4}
	var ip network = &layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocol(p.Number()), SrcIP: p.From.Addr().AsSlice(), DstIP: p.To.Addr().AsSlice()}
	if p.Family() == unix.AF_INET6 {
		eth.EthernetType = layers.EthernetTypeIPv6
		ip = &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: layers.IPProtocol(p.Number()), SrcIP: p.From.Addr().AsSlice(), DstIP: p.To.Addr().AsSlice()}
	}
	all := []gopacket.SerializableLayer{eth, ip}
	if p.Proto == "tcp" {
		t := &layers.TCP{SrcPort: layers.TCPPort(p.From.Port()), DstPort: layers.TCPPort(p.To.Port()), SYN: true, Window: 65535}
		_ = t.SetNetworkLayerForChecksum(ip)
		all = append(all, t)
	} else {
		u := &layers.UDP{SrcPort: layers.UDPPort(p.From.Port()), DstPort: layers.UDPPort(p.To.Port())}
		_ = u.SetNetworkLayerForChecksum(ip)
		all = append(all, u, gopacket.Payload(FramePayload))
	}
	b := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(b, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, all...)
	return b.Bytes(), err
}

// Explanation describes where a packet goes and why.
type Explanation struct {
	Proto  string        `json:"proto"`
	From   string        `json:"from"`
	To     string        `json:"to"`
	Netns  string        `json:"netns"`
	Steps  []ExplainStep `json:"steps"`
	Result string        `json:"result"`         // receiver or fate of the packet
	PID    int           `json:"pid,omitempty"`  // receiving process
	Slot   *int          `json:"slot,omitempty"` // slot of the receiving member
}

// ExplainStep is one step of an explanation: a question and its answer.
type ExplainStep struct {
	Step    string `json:"step"`
	Text    string `json:"text"`
	Warning bool   `json:"warning,omitempty"` // notable for an operator
}

// Stage is a point on a packet's way through the kernel.
type Stage int

// Stages, in the kernel's order.
const (
	StageXDP        Stage = iota // interface, before the kernel allocates a socket buffer
	StageTC                      // tcx and tc filters of the interface
	StagePrerouting              // netfilter, before routing
	StageInput                   // netfilter, packets for this host
	StageLookup                  // socket lookup
	StageSocket                  // cgroup of the socket
	StageForward                 // output device of a forwarded packet, in place of input, lookup and socket
)

// Verdict is a feature's decision about a packet at one stage.
type Verdict struct {
	Stage Stage
	Order int32 // order within the stage, the lowest first: at tcx the program's position
	ExplainStep
	Result string // final fate of the packet: "dropped: rule 2 of filter sip"; empty: it continues
}

// ParsePacket parses the arguments of weir explain: "udp", "192.0.2.7:2055", "10.0.0.1:4739".
func ParsePacket(proto, from, to string) (Packet, error) {
	p := Packet{Proto: proto}
	if proto != "udp" && proto != "tcp" {
		return p, fmt.Errorf("%w: protocol %q: want udp or tcp", ErrPacket, proto)
	}
	for i, text := range []string{from, to} {
		a, err := netip.ParseAddrPort(text)
		if err != nil {
			return p, fmt.Errorf("%w: %q: want an address and a port, like 192.0.2.7:2055 or [2001:db8::7]:2055", ErrPacket, text)
		}
		*[]*netip.AddrPort{&p.From, &p.To}[i] = netip.AddrPortFrom(a.Addr().WithZone("").Unmap(), a.Port())
	}
	return p, p.Check()
}

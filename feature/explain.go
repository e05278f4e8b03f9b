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

// Explainer is implemented by features that decide about arriving packets: they say what
// they would do with one. Nothing is counted or charged.
type Explainer interface {
	Explain(ctx context.Context, r *kernel.Root, p Packet) ([]Verdict, error)
}

// Deliverer is implemented by the feature that knows which socket the kernel gives an arriving packet to.
type Deliverer interface {
	// Deliver explains the lookup of a packet for this host. every says that the kernel gives the packet to each socket bound to its
	// address: broadcast and multicast.
	Deliver(ctx context.Context, r *kernel.Root, p Packet, every bool) (*Explanation, error)
}

// Packet is what an explanation is asked of: an arriving datagram, or a
// connection attempt.
type Packet struct {
	Proto     string         `json:"proto"` // udp or tcp
	From, To  netip.AddrPort `json:"-"`
	Netns     string         `json:"-"` // where it arrives; empty: weir's own
	Inode     uint64         `json:"-"` // of the namespace; host fills it in
	Interface string         `json:"-"` // by which it arrives; host fills it in
}

// ErrPacket says that a packet cannot be.
var ErrPacket = errors.New("no such packet")

// Check returns an error that wraps ErrPacket.
func (p Packet) Check() error {
	switch {
	case p.Proto != "udp" && p.Proto != "tcp":
		return fmt.Errorf("%w: protocol %q: want udp or tcp", ErrPacket, p.Proto)
	case p.From.Addr().Is4() != p.To.Addr().Is4():
		return fmt.Errorf("%w: %s and %s are not of one family", ErrPacket, p.From.Addr(), p.To.Addr())
	}
	return nil
}

// OpenNetns opens the namespace where the packet arrives. The caller closes it.
func (p Packet) OpenNetns() (*netns.Handle, error) {
	open := netns.Current
	if p.Netns != "" {
		open = func() (*netns.Handle, error) { return netns.Open(p.Netns) }
	}
	ns, err := open()
	if err != nil {
		return nil, fmt.Errorf("network namespace: %w", err)
	}
	return ns, nil
}

// Number is the packet's protocol in an IP header.
func (p Packet) Number() uint8 {
	if p.Proto == "tcp" {
		return unix.IPPROTO_TCP
	}
	return unix.IPPROTO_UDP
}

// Family is AF_INET or AF_INET6.
func (p Packet) Family() uint8 {
	if p.To.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// FramePayload is what a datagram of Frame carries.
const FramePayload = "weir"

// Frame is such a packet with its Ethernet header: a datagram of four bytes, or a
// SYN without options; TTL 64, all else 0.
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

// Explanation is why a packet goes where it goes.
type Explanation struct {
	Proto  string        `json:"proto"`
	From   string        `json:"from"`
	To     string        `json:"to"`
	Netns  string        `json:"netns"`
	Steps  []ExplainStep `json:"steps"`
	Result string        `json:"result"`         // who gets it, or what becomes of it
	PID    int           `json:"pid,omitempty"`  // who gets it
	Slot   *int          `json:"slot,omitempty"` // whose member that is
}

// ExplainStep is one step of an explanation: what was asked, and the answer.
type ExplainStep struct {
	Step    string `json:"step"`
	Text    string `json:"text"`
	Warning bool   `json:"warning,omitempty"` // an operator should know
}

// Stage is where on a packet's way a feature sees it.
type Stage int

// Stages, in the kernel's order.
const (
	StageXDP        Stage = iota // the interface, before the kernel has made a packet of it
	StageTC                      // the interface's tcx and tc filters
	StagePrerouting              // netfilter, before routing
	StageInput                   // netfilter, what is for this host
	StageLookup                  // which socket gets it
	StageSocket                  // that socket's cgroup
	StageForward                 // the device by which a packet leaves that is not for this host: in place of input, lookup and socket
)

// Verdict is what a feature does with a packet at one stage.
type Verdict struct {
	Stage Stage
	Order int32 // within the stage, the lowest first: at tcx the program's position
	ExplainStep
	Result string // the packet ends here, or goes elsewhere: "dropped: rule 2 of filter sip"; empty: it goes on
}

// ParsePacket reads what weir explain is given: "udp", "192.0.2.7:2055",
// "10.0.0.1:4739".
func ParsePacket(proto, from, to string) (Packet, error) {
	p := Packet{Proto: proto}
	for i, text := range []string{from, to} {
		a, err := netip.ParseAddrPort(text)
		if err != nil {
			return p, fmt.Errorf("%w: %q: want an address and a port, like 192.0.2.7:2055 or [2001:db8::7]:2055", ErrPacket, text)
		}
		*[]*netip.AddrPort{&p.From, &p.To}[i] = netip.AddrPortFrom(a.Addr().WithZone("").Unmap(), a.Port())
	}
	return p, p.Check()
}

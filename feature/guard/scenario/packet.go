// SPDX-License-Identifier: Apache-2.0

// Package scenario holds what a limiter of UDP floods is judged by: traces of clients and of an attack, the same to the
// packet for a seed, and a judge of the verdicts. It knows no kernel: a [Limiter] may be a BPF program with a virtual
// clock, another algorithm, or a hand-made one in a test.
package scenario

import (
	"encoding/binary"
	"net/netip"
)

// Class says whose a packet is. A limiter must not look at it.
type Class uint8

const (
	Established Class = iota // a client that sent before the attack began
	Newcomer                 // a client whose first packet comes during the attack
	Attack
	Mimic // an attacker before its attack: behaves as a client
	classes
)

func (c Class) String() string {
	return [...]string{"established", "newcomer", "attack", "mimic"}[c]
}

// Packet is a datagram as a limiter sees it.
type Packet struct {
	At      uint64 // ns on the virtual clock; never 0, never before the packet in front of it
	Src     Source
	Payload uint32 // the first four bytes behind the UDP header, in host byte order
	SrcPort uint16 // in host byte order
	Class   Class
}

// Source is a source address of either family. Over IPv4 it is Identity; over IPv6 Identity is the lower half of a /64
// below 2001:db8::/32, and Host the interface identifier in it. So identities of one IPv4 /24 share an IPv6 /56, and
// those of one IPv4 /16 an IPv6 /48.
type Source struct {
	Identity uint32
	Host     uint32 // only IPv6 shows it
}

// client is the Host of every source that has no reason for another: hosts are numbered from 1.
const client = 1

// IPv4 is the address in network byte order.
func (s Source) IPv4() (a [4]byte) {
	binary.BigEndian.PutUint32(a[:], s.Identity)
	return a
}

// IPv6 is the address in network byte order.
func (s Source) IPv6() (a [16]byte) {
	binary.BigEndian.PutUint32(a[:], 0x20010db8)
	binary.BigEndian.PutUint32(a[4:], s.Identity)
	binary.BigEndian.PutUint32(a[12:], s.Host)
	return a
}

// Addr is the address in one of its forms.
func (s Source) Addr(ipv6 bool) netip.Addr {
	if ipv6 {
		return netip.AddrFrom16(s.IPv6())
	}
	return netip.AddrFrom4(s.IPv4())
}

// Limiter decides which packets pass.
type Limiter interface {
	// Decide sets verdicts[i] to whether batch[i] passes. The packets of successive batches are in the order of their
	// times, and what was decided before counts for what comes. len(verdicts) is at least len(batch).
	Decide(batch []Packet, verdicts []bool) error
}

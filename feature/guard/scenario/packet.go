// SPDX-License-Identifier: Apache-2.0

// Package scenario evaluates limiters of UDP floods. It has traces of clients and of an attack,
// reproducible for a seed, and an evaluator of verdicts. It is independent of the kernel. A
// [Limiter] may be a BPF program with a virtual clock, another algorithm, or a stub in a test.
package scenario

import (
	"encoding/binary"
	"net/netip"
)

// Class is the kind of a packet's sender. Limiters must ignore it.
type Class uint8

const (
	Established Class = iota // a client from before the attack
	Newcomer                 // a client with its first packet during the attack
	Attack
	Mimic // an attacker before its attack: behaves like a client
	classes
)

func (c Class) String() string {
	return [...]string{"established", "newcomer", "attack", "mimic"}[c]
}

// Packet is a datagram as seen by a limiter.
type Packet struct {
	At      uint64 // ns on the virtual clock; never 0, never decreasing
	Src     Source
	Payload uint32 // the first four bytes after the UDP header, in host byte order
	SrcPort uint16 // in host byte order
	Class   Class
}

// Source is a source address of either family. For IPv4 it is Identity. For IPv6, Identity is the
// lower half of a /64 below 2001:db8::/32, and Host is the interface identifier. Identities of one
// IPv4 /24 therefore share an IPv6 /56, and identities of one /16 an IPv6 /48.
type Source struct {
	Identity uint32
	Host     uint32 // IPv6 only
}

// client is the default Host of sources: hosts are numbered from 1.
const client = 1

// IPv4 returns the address in network byte order.
func (s Source) IPv4() (a [4]byte) {
	binary.BigEndian.PutUint32(a[:], s.Identity)
	return a
}

// IPv6 returns the address in network byte order.
func (s Source) IPv6() (a [16]byte) {
	binary.BigEndian.PutUint32(a[:], 0x20010db8)
	binary.BigEndian.PutUint32(a[4:], s.Identity)
	binary.BigEndian.PutUint32(a[12:], s.Host)
	return a
}

// Addr returns the address of the given family.
func (s Source) Addr(ipv6 bool) netip.Addr {
	if ipv6 {
		return netip.AddrFrom16(s.IPv6())
	}
	return netip.AddrFrom4(s.IPv4())
}

// Limiter decides which packets pass.
type Limiter interface {
	// Decide sets verdicts[i] to whether batch[i] passes. Packets of successive batches are ordered
	// by time, and earlier decisions influence later ones. len(verdicts) is at least len(batch).
	Decide(batch []Packet, verdicts []bool) error
}

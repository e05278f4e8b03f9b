// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"math/rand/v2"
	"time"
)

// Attack patterns.

func port(r *rand.Rand) uint16 { return uint16(r.Uint32()) }

func oneFlow(_ *rand.Rand, _ int, _ time.Duration, p *Packet) {
	p.Src.Identity, p.SrcPort = 0x05060708, 999
}

// oneNet has all hosts of a /24, from all ports.
func oneNet(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	x := r.Uint32()
	p.Src.Identity, p.SrcPort = 0x05060700|x>>24, uint16(x)
}

// reflection has responses of open resolvers: any address, one port.
func reflection(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	p.Src.Identity, p.SrcPort = r.Uint32(), 53
}

func reflectors(n int) draw {
	return func(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
		p.Src.Identity, p.SrcPort = 0x13000000+r.Uint32N(uint32(n))*0x5c6ef, 53
	}
}

// inTurn has n sources in turn. Each has its own port or, with shared set, the same one.
func inTurn(n int, shared uint16) draw {
	return func(_ *rand.Rand, i int, _ time.Duration, p *Packet) {
		k := uint32(i % n)
		p.Src.Identity, p.SrcPort = 0x11000000+k*0x1f3d5b, shared
		if shared == 0 {
			p.SrcPort = uint16(2000 + k)
		}
	}
}

// spoofed has any address and port.
func spoofed(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	x := r.Uint64()
	p.Src.Identity, p.SrcPort = uint32(x), uint16(x>>32)
}

// pool has n addresses of the attacker, from any port.
func pool(n int) draw {
	return func(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
		p.Src.Identity, p.SrcPort = 0x12000000+r.Uint32N(uint32(n))*0x3c6ef, port(r)
	}
}

// changing switches to another pattern each second.
func changing(r *rand.Rand, i int, since time.Duration, p *Packet) {
	all := [...]draw{oneFlow, oneNet, reflection, fifty, twoThousand, spoofed}
	second := int(since / time.Second)
	all[second%len(all)](r, i+7*second, since, p)
}

var (
	fifty       = inTurn(50, 777)
	twoThousand = inTurn(2000, 0)
)

// stolen has the addresses and ports of the first n sources of a list.
func stolen(packets []Packet, n int) draw {
	var from []Packet
	seen := map[Source]bool{}
	for _, p := range packets {
		if !seen[p.Src] && len(from) < n {
			from = append(from, p)
		}
		seen[p.Src] = true
	}
	return func(_ *rand.Rand, i int, _ time.Duration, p *Packet) {
		p.Src, p.SrcPort = from[i%n].Src, from[i%n].SrcPort
	}
}

// pulse alternates a second of attack and a second of silence.
func pulse(since time.Duration) bool { return since/time.Second%2 == 0 }

// Patterns of IPv6 only.

// one64 has every interface identifier of one /64.
func one64(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	p.Src, p.SrcPort = Source{Identity: 0x05060708, Host: r.Uint32()}, port(r)
}

// one48 has every /64 of one /48, with any host.
func one48(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	x := r.Uint64()
	p.Src, p.SrcPort = Source{Identity: 0x05060000 | uint32(x)&0xffff, Host: uint32(x >> 32)}, uint16(x>>16)
}

// anywhere has any /64 and any host.
func anywhere(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	x := r.Uint64()
	p.Src, p.SrcPort = Source{Identity: uint32(x), Host: uint32(x >> 32)}, port(r)
}

// payloads has one flow with random payload. A limiter mistaking payload for addresses sees many
// flows.
func payloads(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	p.Src.Identity, p.SrcPort, p.Payload = 0x05060708, 999, r.Uint32()
}

// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"math/rand/v2"
	"time"
)

// The patterns of attacks.

func port(r *rand.Rand) uint16 { return uint16(r.Uint32()) }

func oneFlow(_ *rand.Rand, _ int, _ time.Duration, p *Packet) {
	p.Src.Identity, p.SrcPort = 0x05060708, 999
}

// oneNet is all hosts of a /24, from all ports.
func oneNet(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	x := r.Uint32()
	p.Src.Identity, p.SrcPort = 0x05060700|x>>24, uint16(x)
}

// reflection is what open resolvers send back: any address, one port.
func reflection(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	p.Src.Identity, p.SrcPort = r.Uint32(), 53
}

func reflectors(n int) draw {
	return func(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
		p.Src.Identity, p.SrcPort = 0x13000000+r.Uint32N(uint32(n))*0x5c6ef, 53
	}
}

// inTurn is n sources, each with one port of its own or, with one set, a port that all share.
func inTurn(n int, shared uint16) draw {
	return func(_ *rand.Rand, i int, _ time.Duration, p *Packet) {
		k := uint32(i % n)
		p.Src.Identity, p.SrcPort = 0x11000000+k*0x1f3d5b, shared
		if shared == 0 {
			p.SrcPort = uint16(2000 + k)
		}
	}
}

// spoofed is any address and port.
func spoofed(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	x := r.Uint64()
	p.Src.Identity, p.SrcPort = uint32(x), uint16(x>>32)
}

// pool is n addresses that the attacker has, from any port.
func pool(n int) draw {
	return func(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
		p.Src.Identity, p.SrcPort = 0x12000000+r.Uint32N(uint32(n))*0x3c6ef, port(r)
	}
}

// changing takes another pattern each second.
func changing(r *rand.Rand, i int, since time.Duration, p *Packet) {
	all := [...]draw{oneFlow, oneNet, reflection, fifty, twoThousand, spoofed}
	second := int(since / time.Second)
	all[second%len(all)](r, i+7*second, since, p)
}

var (
	fifty       = inTurn(50, 777)
	twoThousand = inTurn(2000, 0)
)

// stolen is the addresses and ports of the first n sources of a list.
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

// pulse is a second of attack and a second of silence.
func pulse(since time.Duration) bool { return since/time.Second%2 == 0 }

// The patterns that only IPv6 has.

// one64 is every interface identifier of one /64.
func one64(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	p.Src, p.SrcPort = Source{Identity: 0x05060708, Host: r.Uint32()}, port(r)
}

// one48 is every /64 of one /48, and any host in it.
func one48(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	x := r.Uint64()
	p.Src, p.SrcPort = Source{Identity: 0x05060000 | uint32(x)&0xffff, Host: uint32(x >> 32)}, uint16(x>>16)
}

// anywhere is any /64 and any host.
func anywhere(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	x := r.Uint64()
	p.Src, p.SrcPort = Source{Identity: uint32(x), Host: uint32(x >> 32)}, port(r)
}

// payloads is one flow whose payload is random: to a limiter that takes payload for addresses it is many.
func payloads(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
	p.Src.Identity, p.SrcPort, p.Payload = 0x05060708, 999, r.Uint32()
}

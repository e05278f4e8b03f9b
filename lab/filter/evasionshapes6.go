// SPDX-License-Identifier: Apache-2.0

package filters

import "slices"

const headerAuth = 51

// header is an extension header. The number of its next header is written later.
type header struct {
	kind  byte
	bytes []byte
}

// The extension headers of shapes.
var (
	hopHeader     = header{headerHop, []byte{0, 0, 1, 4, 0, 0, 0, 0}}                         // PadN
	optionsHeader = header{headerOption, []byte{0, 0, 1, 4, 0, 0, 0, 0}}                      //
	longHeader    = header{headerOption, append([]byte{0, 31, 1, 252}, make([]byte, 252)...)} // 256 bytes
	authHeader    = header{headerAuth, authentication(0)}
	atomicHeader  = header{headerFragment, make([]byte, 8)}
)

// routingHeader returns a routing header of a type, with no segments left; type 4 has one segment (RFC
// 8754).
func routingHeader(kind byte) header {
	if kind != 4 {
		return header{headerRouting, []byte{0, 0, kind, 0, 0, 0, 0, 0}}
	}
	return header{headerRouting, append([]byte{0, 2, 4, 0, 0, 0, 0, 0}, make([]byte, 16)...)}
}

func (h header) times(n int) []header { return slices.Repeat([]header{h}, n) }

// wrap puts extension headers before a body, and returns the number of the first.
func wrap(headers []header, proto byte, body []byte) (byte, []byte) {
	next := proto
	for _, h := range slices.Backward(headers) {
		b := slices.Clone(h.bytes)
		b[0] = next
		next, body = h.kind, append(b, body...)
	}
	return next, body
}

// chain6 returns a shape of a single IPv6 packet behind extension headers.
func chain6(headers ...header) func(*disguise) [][]byte {
	return func(p *disguise) [][]byte {
		next, body := wrap(headers, p.proto, p.segment)
		return [][]byte{p.v6(next, body)}
	}
}

// cut6 returns a shape of fragments at these first bytes, with headers before and behind the fragment
// header.
func cut6(before, behind []header, at []int, order ...int) func(*disguise) [][]byte {
	return func(p *disguise) [][]byte {
		next, body := wrap(behind, p.proto, p.segment)
		var out [][]byte
		for i, from := range at {
			to, more := len(body), uint16(0)
			if i < len(at)-1 {
				to, more = at[i+1], 1
			}
			out = append(out, p.fragment6(before, next, uint16(from)|more, body[from:to]))
		}
		return ordered(out, order)
	}
}

func (p *disguise) fragment6(before []header, next byte, field uint16, body []byte) []byte {
	h := be.AppendUint32(be.AppendUint16([]byte{next, 0}, field), p.id)
	first, b := wrap(before, headerFragment, append(h, body...))
	return p.v6(first, b)
}

func shapes6() []shape {
	hops := slices.Concat([]header{hopHeader}, optionsHeader.times(1), []header{routingHeader(0)}, optionsHeader.times(1))
	six := func(name string, packets func(*disguise) [][]byte) shape {
		return shape{name: "IPv6" + name, six: true, packets: packets}
	}
	blind := func(name string, packets func(*disguise) [][]byte) shape {
		return shape{name: "IPv6" + name, six: true, packets: packets, blind: true}
	}
	return []shape{
		six("", chain6()),
		six(", destination options", chain6(optionsHeader)),
		six(", 8 headers", chain6(optionsHeader.times(8)...)),
		six(", 9 headers", chain6(optionsHeader.times(9)...)),
		six(", 20 headers", chain6(optionsHeader.times(20)...)),
		six(", 32 headers", chain6(optionsHeader.times(32)...)),
		blind(", 33 headers", chain6(optionsHeader.times(33)...)),
		six(", long options", chain6(longHeader, longHeader)),
		six(", hop-by-hop, options and routing", chain6(hops...)),
		six(", routing header 0", chain6(routingHeader(0))),
		six(", routing header 4", chain6(routingHeader(4))),
		six(", routing header of no known type", chain6(routingHeader(200))),
		six(", AH", chain6(authHeader)),
		six(", options, AH, options", chain6(optionsHeader, authHeader, optionsHeader)),
		six(", hop-by-hop and no length", func(p *disguise) [][]byte { return unlengthed(chain6(hopHeader)(p)) }),
		six(", jumbo payload option", func(p *disguise) [][]byte {
			jumbo := header{headerHop, []byte{0, 0, 0xc2, 4, 0, 0, 0, byte(8 + len(p.segment))}}
			return unlengthed(chain6(jumbo)(p))
		}),
		six(", atomic fragment", chain6(atomicHeader)),
		six(", two fragment headers", chain6(atomicHeader, atomicHeader)),
		six(", first fragment of 8", cut6(nil, nil, []int{0, 8})),
		six(", first fragment of 16", cut6(nil, nil, []int{0, 16})),
		six(", first fragment of 24", cut6(nil, nil, []int{0, 24})),
		six(", late first fragment of 8", cut6(nil, nil, []int{0, 8}, 1, 0)),
		six(", late first fragment of 24", cut6(nil, nil, []int{0, 24}, 1, 0)),
		six(", first fragment of 24 behind 9 headers", cut6(optionsHeader.times(9), nil, []int{0, 24})),
		six(", 9 headers within fragments", cut6(nil, optionsHeader.times(9), []int{0, 96})),
		blind(", headers without an end in the first fragment", cut6(nil, optionsHeader.times(3), []int{0, 16})),
		blind(", an empty first fragment", func(p *disguise) [][]byte {
			return [][]byte{p.fragment6(nil, p.proto, 1, nil), p.fragment6(nil, p.proto, 0, p.segment)}
		}),
		six(", overlapping fragments", func(p *disguise) [][]byte {
			return [][]byte{p.fragment6(nil, p.proto, 1, p.segment[:24]), p.fragment6(nil, p.proto, 8, p.segment[8:])}
		}),
	}
}

// unlengthed sets the payload length of IPv6 packets to 0.
func unlengthed(packets [][]byte) [][]byte {
	for _, b := range packets {
		be.PutUint16(b[4:], 0)
	}
	return packets
}

// shapesTunnel returns the shapes with ports behind a second IP header.
func shapesTunnel() []shape {
	in := func(name string, six, sid bool, packets func(*disguise) [][]byte) shape {
		return shape{name: name, six: six, toSID: sid, inside: true, packets: packets}
	}
	gre := func(flags byte, proto uint16, more ...byte) []byte {
		return append(be.AppendUint16([]byte{flags, 0}, proto), more...)
	}
	return []shape{
		in("IPIP", false, false, func(p *disguise) [][]byte { return [][]byte{p.v4("", 0, 4, p.inner4())} }),
		in("6in4", false, false, func(p *disguise) [][]byte { return [][]byte{p.v4("", 0, 41, p.inner6())} }),
		in("4in6", true, false, func(p *disguise) [][]byte { return [][]byte{p.v6(4, p.inner4())} }),
		in("6in6", true, false, func(p *disguise) [][]byte { return [][]byte{p.v6(41, p.inner6())} }),
		in("GRE", false, false, func(p *disguise) [][]byte { return [][]byte{p.v4("", 0, 47, append(gre(0, 0x0800), p.inner4()...))} }),
		in("GRE with a key", false, false, func(p *disguise) [][]byte {
			return [][]byte{p.v4("", 0, 47, append(gre(0x20, 0x86dd, 0, 0, 0, 7), p.inner6()...))}
		}),
		in("GRE over IPv6", true, false, func(p *disguise) [][]byte { return [][]byte{p.v6(47, append(gre(0, 0x86dd), p.inner6()...))} }),
		in("VXLAN", false, false, func(p *disguise) [][]byte { return [][]byte{p.v4("", 0, protoUDP, p.vxlan())} }),
		in("SRv6, reduced", true, true, func(p *disguise) [][]byte { return [][]byte{p.v6(41, p.inner6())} }),
		in("SRv6", true, true, func(p *disguise) [][]byte {
			next, body := wrap([]header{routingHeader(4)}, 41, p.inner6())
			copy(body[8:], sid[:])
			return [][]byte{p.v6(next, body)}
		}),
	}
}

// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"math/rand/v2"
	"time"
)

// attackNet has the hosts of a flood: 203.0.113.0 (RFC 5737).
const attackNet = 0xcb007100

// hosts returns n hosts with addresses stride apart, in random order, from any port.
func hosts(base uint32, n int, stride uint32) draw {
	return func(r *rand.Rand, _ int, _ time.Duration, p *Packet) {
		p.Src.Identity, p.SrcPort = base+r.Uint32N(uint32(n))*stride, port(r)
	}
}

// coldStarts returns scenarios with a guard applied during a flood, and clients sharing networks.
func coldStarts() []Scenario {
	cold := func(name, about string, build func(*builder)) Scenario {
		return Scenario{Name: "start_" + name, About: about + "; 20,000 pps from the guard's first packet on",
			To: 20 * second, Short: 12 * second, WarmUp: 5 * second, ColdStart: true, build: build}
	}
	crowd := func(n int, pps float64, d draw) func(*builder) {
		return func(b *builder) {
			b.crowd(clientNet, n, pps, Newcomer)
			b.flood(20e3, nil, d)
		}
	}
	few := hosts(attackNet, 20, 1)
	return []Scenario{
		cold("net24_100", "20 hosts of a /24; 250 clients of one /24 send 100 pps", crowd(250, 100, few)),
		cold("net24_200", "20 hosts of a /24; 250 clients of one /24 send 200 pps", crowd(250, 200, few)),
		cold("net24_400", "20 hosts of a /24; 250 clients of one /24 send 400 pps", crowd(250, 400, few)),
		cold("nets24_600", "20 hosts of a /24; 600 clients of three /24s send 600 pps", crowd(600, 600, few)),
		cold("spread_200", "20 hosts of as many networks; 250 clients of one /24 send 200 pps", crowd(250, 200, hosts(attackNet, 20, 0x1f3d5b))),
		cold("beside_200", "20 hosts of the /24 of 200 clients that send 200 pps", crowd(200, 200, hosts(clientNet+220, 20, 1))),
		cold("hosts_1000", "1,000 hosts of four /24s; 250 clients of one /24 send 400 pps", crowd(250, 400, hosts(attackNet, 1000, 1))),
		cold("spoofed_200", "any address; 100 clients of one /24 send 200 pps", crowd(100, 200, spoofed)),
		cold("large_500", "20 hosts of a /24; five clients of one /24 send 500 pps", crowd(5, 500, few)),
		cold("zipf_400", "20 hosts of a /24; of 50 clients of one /24 the first has 172 pps, the last half a pps", func(b *builder) {
			for i, pps := range shares(50, 1.5, 400) {
				b.crowd(clientNet+uint32(i), 1, pps, Newcomer)
			}
			b.flood(20e3, nil, few)
		}),
		cold("one_port_400", "20 hosts of a /24; 250 clients of one /24 send 400 pps from one port", func(b *builder) {
			for i := range 250 {
				p := Packet{Src: Source{Identity: clientNet + uint32(i), Host: client}, SrcPort: 5353, Class: Newcomer}
				b.client(0, b.To, 400./250, poisson, p)
			}
			b.flood(20e3, nil, few)
		}),
	}
}

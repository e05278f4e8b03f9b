// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// Scenario has clients, an attack, and a limit for both.
type Scenario struct {
	Name  string // part of metric names
	About string
	Limit uint64 // packets per second

	// The attack lasts from From to To, the evaluated time. Before it, only clients send.
	From, To time.Duration
	// Short is the length of an equivalent shorter attack; 0 if none exists. Long excludes the
	// scenario from quick runs, with others in its place.
	Short time.Duration
	Long  bool

	// LegitCounts makes legit_kept count. All established clients sent before the attack, their
	// addresses are exclusive, and together they stay below the limit. NewcomersCount means enough
	// newcomers for a meaningful newcomers_kept.
	LegitCounts, NewcomersCount bool
	// KnownCounts makes the worst single client count: 1 - Outcome.MinClient.
	KnownCounts bool
	// ColdStart means no client existed before the attack, and all clients together stay below the
	// limit. Then newcomers_kept counts, after WarmUp.
	ColdStart bool
	// WarmUp is the time from From to the beginning of the evaluation.
	WarmUp time.Duration
	// Seeds is the minimum number of seeds in a run.
	Seeds int
	// IPv6 marks an IPv6-only scenario. The others are valid for both families.
	IPv6 bool

	build func(*builder)
}

// Shortened returns the scenario with its attack cut to Short, if set.
func (s Scenario) Shortened() Scenario {
	if s.Short > 0 {
		s.To = s.From + s.Short
	}
	return s
}

// Defaults of scenarios: the clients together use two fifths of the limit.
const (
	limit     = 1000
	clients   = 200
	clientPPS = 2
	warm      = 30 * time.Second
)

// All returns the scenarios in reading order.
func All() []Scenario {
	var all []Scenario
	for _, group := range [][]Scenario{floods(), large(), patience(), resolvers(), arrivals(), coldStarts(), limits(), ipv6()} {
		for _, s := range group {
			if s.Limit == 0 {
				s.Limit = limit
			}
			all = append(all, s)
		}
	}
	return all
}

// Lookup returns a scenario by its name.
func Lookup(name string) (Scenario, error) {
	for _, s := range All() {
		if s.Name == name {
			return s, nil
		}
	}
	return Scenario{}, fmt.Errorf("no scenario is named %q", name)
}

// flooded has the standard clients, and an attack with one pattern.
func flooded(pps float64, on func(time.Duration) bool, d draw) func(*builder) {
	return func(b *builder) {
		b.clients(clients, clientPPS, 0, jittered, Established)
		if pps > 0 {
			b.flood(pps, on, d)
		}
	}
}

// scene returns a scenario with the usual 30 s of clients alone before the attack.
func scene(name, about string, length, short time.Duration, build func(*builder)) Scenario {
	return Scenario{Name: name, About: about, From: warm, To: warm + length, Short: short, LegitCounts: true, build: build}
}

const second = time.Second

func floods() []Scenario {
	return []Scenario{
		scene("no_attack", "clients alone", 10*second, 0, flooded(0, nil, nil)),
		scene("single_flow", "one flow of 50,000 pps", 10*second, 5*second, flooded(50e3, nil, oneFlow)),
		scene("net24_50k", "one /24 from all ports, 50,000 pps", 10*second, 5*second, flooded(50e3, nil, oneNet)),
		scene("net24_1m", "one /24 from all ports, 1,000,000 pps", 3*second, second/2, flooded(1e6, nil, oneNet)),
		scene("reflection", "any address from port 53, 50,000 pps", 10*second, 5*second, flooded(50e3, nil, reflection)),
		scene("sources_50x2k", "50 sources of 2,000 pps from one port", 10*second, 5*second, flooded(100e3, nil, fifty)),
		scene("sources_2000x25", "2,000 sources of 25 pps, each below any limit of its own", 10*second, 5*second, flooded(50e3, nil, twoThousand)),
		scene("spoofed_50k", "any address and port, 50,000 pps", 10*second, 5*second, flooded(50e3, nil, spoofed)),
		scene("spoofed_1m", "any address and port, 1,000,000 pps", 3*second, second, flooded(1e6, nil, spoofed)),
		scene("pulsing_spoofed", "spoofed, 50,000 pps in every other second", 12*second, 6*second, flooded(50e3, pulse, spoofed)),
		scene("pulsing_2000x25", "2,000 sources of 25 pps in every other second", 12*second, 6*second, flooded(50e3, pulse, twoThousand)),
		scene("changing", "another of six patterns each second, 50,000 pps", 12*second, 6*second, flooded(50e3, nil, changing)),
		scene("pool_16384", "16,384 addresses in random order, from any port, 50,000 pps", 10*second, 5*second, flooded(50e3, nil, pool(16384))),
		scene("poisson_spoofed", "spoofed, 50,000 pps; clients send at random moments", 10*second, 5*second, func(b *builder) {
			b.clients(clients, clientPPS, 0, poisson, Established)
			b.flood(50e3, nil, spoofed)
		}),
		scene("mixed", "one flow, one /24, reflection and spoofed addresses at once, 20,000 pps each", 10*second, 5*second, func(b *builder) {
			b.clients(clients, clientPPS, 0, jittered, Established)
			for _, d := range []draw{oneFlow, oneNet, reflection, spoofed} {
				b.flood(20e3, nil, d)
			}
		}),
		scene("bursty_spoofed", "spoofed, 50,000 pps; clients send four packets at a time", 12*second, 6*second, func(b *builder) {
			b.clients(clients, clientPPS, 0, bursts, Established)
			b.flood(50e3, nil, spoofed)
		}),
		{Name: "stolen_addresses", About: "50,000 pps from the addresses and ports of 20 of the 200 clients", From: warm, To: warm + 10*second, Short: 5 * second,
			build: func(b *builder) {
				b.clients(clients, clientPPS, 0, jittered, Established)
				b.flood(50e3, nil, stolen(b.trace.quiet, 20))
			}},
		{Name: "warm_8s_spoofed", About: "spoofed, 50,000 pps; clients are known for 8 s only", From: 8 * second, To: 18 * second, Short: 5 * second,
			LegitCounts: true, build: flooded(50e3, nil, spoofed)},
	}
}

// large returns scenarios with few clients, or a few dominant ones. Together they use the usual
// part of the limit.
func large() []Scenario {
	many := func(name, about string, attack float64, on func(time.Duration) bool, d draw, rates []float64) Scenario {
		return scene(name, about, 10*second, 5*second, func(b *builder) {
			for _, pps := range rates {
				b.clients(1, pps, 0, jittered, Established)
			}
			b.flood(attack, on, d)
		})
	}
	one, four, zipf := []float64{440}, []float64{200, 70, 70, 70}, shares(50, 1.5, 400)
	return []Scenario{
		many("large_1_spoofed", "spoofed, 50,000 pps; one client has 440 pps", 50e3, nil, spoofed, one),
		many("large_1_2000x25", "2,000 sources of 25 pps; one client has 440 pps", 50e3, nil, twoThousand, one),
		many("large_1_pulsing", "spoofed, 50,000 pps in every other second; one client has 440 pps", 50e3, pulse, spoofed, one),
		many("large_4_spoofed", "spoofed, 50,000 pps; four clients have 200, 70, 70 and 70 pps", 50e3, nil, spoofed, four),
		many("large_4_2000x25", "2,000 sources of 25 pps; four clients have 200, 70, 70 and 70 pps", 50e3, nil, twoThousand, four),
		many("large_zipf_spoofed", "spoofed, 50,000 pps; of 50 clients the first has 172 pps, the last half a pps", 50e3, nil, spoofed, zipf),
		many("large_zipf_2000x25", "2,000 sources of 25 pps; of 50 clients the first has 172 pps, the last half a pps", 50e3, nil, twoThousand, zipf),
		many("large_zipf_pulsing", "2,000 sources of 25 pps in every other second; of 50 clients the first has 172 pps, the last half a pps", 50e3, pulse, twoThousand, zipf),
	}
}

// resolvers returns scenarios with three dominant clients, under a spoofed flood.
func resolvers() []Scenario {
	known := func(name string, known time.Duration) Scenario {
		return Scenario{Name: name, About: fmt.Sprintf("spoofed, 20,000 pps; 100 clients send 200 pps and three resolvers 150 pps each, known for %s", known),
			From: known, To: known + 12*second, LegitCounts: true, KnownCounts: true, Seeds: 10,
			build: func(b *builder) {
				b.crowd(clientNet, 100, 200, Established)
				b.crowd(0xc6336435, 3, 450, Established)
				b.flood(20e3, nil, spoofed)
			}}
	}
	return []Scenario{known("resolvers_14s", 14*second), known("resolvers_28s", 28*second)}
}

// shares returns n rates with the given sum. The i-th is proportional to (1/i)^exponent (Zipf).
func shares(n int, exponent, sum float64) []float64 {
	out, all := make([]float64, n), 0.0
	for i := range out {
		out[i] = math.Pow(float64(i+1), -exponent)
		all += out[i]
	}
	for i := range out {
		out[i] *= sum / all
	}
	return out
}

// patience returns scenarios with attackers behaving for a minute before their flood.
func patience() []Scenario {
	patient := func(name, about string, legitFrom time.Duration, n int, low, high float64) Scenario {
		return Scenario{Name: name, About: about, From: 60 * second, To: 72 * second, LegitCounts: true,
			build: func(b *builder) {
				b.clients(clients, clientPPS, legitFrom, jittered, Established)
				b.patient(n, low, high)
			}}
	}
	return []Scenario{
		patient("slow_1000x50", "1,000 sources of 0.5 pps, then of 50 pps", 0, 1000, 0.5, 50),
		patient("slow_8x6k", "8 sources of 60 pps, then of 6,000 pps", 0, 8, 60, 6000),
		patient("slow_2x180", "2 sources of 180 pps, then of 25,000 pps, which came 30 s before the clients", 30*second, 2, 180, 25e3),
		patient("slow_2000x25", "2,000 sources of 0.1 pps, then of 25 pps", 0, 2000, 0.1, 25),
		patient("slow_first", "1,000 sources of 0.5 pps, then of 50 pps, which came 30 s before the clients", 30*second, 1000, 0.5, 50),
	}
}

// arrivals returns scenarios with clients unknown before the attack.
func arrivals() []Scenario {
	joined := func(name, about string, length, short time.Duration, pps float64, d draw) Scenario {
		s := scene(name, about, length, short, func(b *builder) {
			flooded(pps, nil, d)(b)
			b.joining(20 * int(b.To-b.From) / int(60*second))
		})
		s.NewcomersCount = true
		return s
	}
	cold := func(name, about string, d draw) Scenario {
		return Scenario{Name: name, About: about, To: 30 * second, Short: 6 * second, build: func(b *builder) {
			b.clients(clients, clientPPS, 0, jittered, Newcomer)
			b.flood(50e3, nil, d)
		}}
	}
	long := func(s Scenario) Scenario {
		s.Long = true
		return s
	}
	return []Scenario{
		joined("new_spoofed_50k", "clients join one after the other while 50,000 pps are spoofed", 60*second, 0, 50e3, spoofed),
		long(joined("new_spoofed_1m", "clients join while 1,000,000 pps are spoofed", 20*second, 0, 1e6, spoofed)),
		joined("new_2000x25", "clients join while 2,000 sources send 25 pps each", 60*second, 12*second, 50e3, twoThousand),
		joined("new_reflection", "clients join while 50,000 pps come from port 53 of any address", 30*second, 10*second, 50e3, reflection),
		long(joined("new_reflectors_10k", "clients join while 50,000 pps come from port 53 of 10,000 addresses", 30*second, 0, 50e3, reflectors(10000))),
		long(joined("new_net24", "clients join while one /24 sends 50,000 pps", 30*second, 0, 50e3, oneNet)),
		long(joined("new_pool_16384", "clients join while 16,384 addresses send 50,000 pps", 30*second, 0, 50e3, pool(16384))),
		func() Scenario {
			s := scene("flash_crowd", "no attack: 800 clients come beside the 200, together twice the limit", 30*second, 0, func(b *builder) {
				b.clients(clients, clientPPS, 0, jittered, Established)
				b.clients(4*clients, clientPPS, b.From, jittered, Newcomer)
			})
			s.NewcomersCount = true
			return s
		}(),
		cold("cold_spoofed", "spoofed, 50,000 pps, from the first moment on", spoofed),
		cold("cold_2000x25", "2,000 sources of 25 pps from the first moment on", twoThousand),
	}
}

// limits returns spoofed floods under limits other than 1,000 pps. Clients use two fifths of each.
func limits() []Scenario {
	under := func(name string, limit uint64, n int, pps, attack float64) Scenario {
		s := scene(name, fmt.Sprintf("spoofed, %.0f pps, under a limit of %d pps", attack, limit), 10*second, 3*second, func(b *builder) {
			b.clients(n, pps, 0, jittered, Established)
			b.flood(attack, nil, spoofed)
		})
		s.Limit = limit
		return s
	}
	return []Scenario{
		under("limit_100", 100, 20, 2, 50e3),
		under("limit_20k", 20_000, 1000, 8, 100e3),
	}
}

func ipv6() []Scenario {
	only := func(name, about string, build func(*builder)) Scenario {
		s := scene(name, about, 10*second, 5*second, build)
		s.IPv6 = true
		return s
	}
	return []Scenario{
		only("v6_one_64", "every host of one /64, 50,000 pps", flooded(50e3, nil, one64)),
		only("v6_one_48", "every /64 of one /48, 50,000 pps", flooded(50e3, nil, one48)),
		only("v6_spoofed", "any /64 and host, 50,000 pps", flooded(50e3, nil, anywhere)),
		only("v6_beside_client", "one host in the /64 of a client, 50,000 pps", func(b *builder) {
			b.clients(clients, clientPPS, 0, jittered, Established)
			victim := b.trace.quiet[0].Src.Identity
			b.flood(50e3, nil, func(_ *rand.Rand, _ int, _ time.Duration, p *Packet) {
				p.Src, p.SrcPort = Source{Identity: victim, Host: 0xbad}, 999
			})
		}),
		only("v6_random_payload", "one flow with random payload, 50,000 pps", flooded(50e3, nil, payloads)),
	}
}

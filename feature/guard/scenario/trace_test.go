// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"cmp"
	"math"
	"net/netip"
	"regexp"
	"slices"
	"testing"
	"time"
)

func TestSourceForms(t *testing.T) {
	s := Source{Identity: 0x05060708, Host: 0xabcd}
	if got, want := s.Addr(false), netip.MustParseAddr("5.6.7.8"); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, want := s.Addr(true), netip.MustParseAddr("2001:db8:506:708::abcd"); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestNames(t *testing.T) {
	all := All()
	if len(all) < 25 {
		t.Errorf("%d scenarios", len(all))
	}
	seen := map[string]bool{}
	for _, s := range all {
		if !regexp.MustCompile(`^[a-z0-9_]+$`).MatchString(s.Name) || seen[s.Name] {
			t.Errorf("%q is taken, or not valid in a metric's name", s.Name)
		}
		seen[s.Name] = true
		if s.Long && s.Short > 0 {
			t.Errorf("%s is for long runs only, but has a short form", s.Name)
		}
		if s.About == "" || s.Limit < 100 || s.To <= s.From || s.Shortened().To > s.To || s.Shortened().To <= s.From {
			t.Errorf("%+v", s)
		}
		if got, err := Lookup(s.Name); err != nil || got.Name != s.Name {
			t.Errorf("%s: %v, %v", s.Name, got.Name, err)
		}
	}
	if _, err := Lookup("nothing"); err == nil {
		t.Error("found a scenario named \"nothing\"")
	}
}

// heavy traces are skipped by the test: smaller ones have the same patterns and rates.
func heavy(s Scenario) bool { return s.Name == "new_spoofed_1m" }

// Properties of every trace required by the evaluation.
func TestTraces(t *testing.T) {
	for _, s := range All() {
		if heavy(s) {
			continue
		}
		s = s.Shortened()
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel()
			tr := s.Trace(3)
			from, to := tr.Start()+uint64(s.From), tr.Start()+uint64(s.To)
			if tr.Start() < uptime || tr.Start() >= uptime+epochs {
				t.Errorf("the trace starts at %d ns", tr.Start())
			}
			first := map[Source]uint64{}
			var last uint64
			var during [classes]int
			for _, p := range tr.All() {
				if p.At < last || p.At < tr.Start() || p.At >= to {
					t.Fatalf("a packet at %d follows one at %d; the trace is from %d to %d", p.At, last, tr.Start(), to)
				}
				last = p.At
				if p.Class == Attack != (p.At >= from && p.Class != Established && p.Class != Newcomer) {
					t.Fatalf("%s at %d, but the attack begins at %d", p.Class, p.At, from)
				}
				if _, ok := first[p.Src]; !ok && p.Class != Attack {
					first[p.Src] = p.At
				}
				switch {
				case p.Class == Established && first[p.Src] >= from:
					t.Fatalf("%v is established, but first sent at %d", p.Src, p.At)
				case p.Class == Newcomer && (p.At < from || first[p.Src] < from):
					t.Fatalf("%v is new, but sent a packet at %d", p.Src, p.At)
				}
				if p.At >= from {
					during[p.Class]++
				}
			}
			if during[Mimic] != 0 {
				t.Errorf("%d attackers still behave", during[Mimic])
			}
			seconds := (s.To - s.From).Seconds()
			// Clients send two fifths of the limit; with the resolvers of KnownCounts, 65 %.
			low, high := 0.35, 0.45
			if s.KnownCounts {
				low, high = 0.6, 0.7
			}
			if pps := float64(during[Established]) / seconds; s.LegitCounts && (pps < low*float64(s.Limit) || pps > high*float64(s.Limit)) {
				t.Errorf("clients send %.0f pps under a limit of %d", pps, s.Limit)
			}
			if s.NewcomersCount && during[Newcomer] < 10 {
				t.Errorf("only %d packets of newcomers", during[Newcomer])
			}
			if !s.LegitCounts && during[Established] > 0 && s.Name != "stolen_addresses" {
				t.Errorf("%d packets of established clients are not counted", during[Established])
			}
		})
	}
}

// The rates in the scenarios' names.
func TestRates(t *testing.T) {
	for name, want := range map[string]float64{"no_attack": 0, "single_flow": 50e3, "sources_50x2k": 100e3, "net24_1m": 1e6,
		"pulsing_spoofed": 25e3, "slow_1000x50": 50e3, "slow_8x6k": 48e3} {
		s, err := Lookup(name)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, p := range s.Trace(1).All() {
			if p.Class == Attack {
				n++
			}
		}
		if pps := float64(n) / (s.To - s.From).Seconds(); math.Abs(pps-want) > 0.02*want {
			t.Errorf("%s: %.0f pps, want %.0f", name, pps, want)
		}
	}
}

// The sources of an attack have the properties of its scenario.
func TestPatterns(t *testing.T) {
	type kinds struct{ hosts, identities, slash24, slash16, ports int }
	for name, want := range map[string]kinds{
		"single_flow":       {1, 1, 1, 1, 1},
		"net24_50k":         {256, 256, 1, 1, 60000},
		"sources_50x2k":     {50, 50, 50, -1, 1},
		"sources_2000x25":   {2000, 2000, 2000, -1, 2000},
		"v6_one_64":         {200000, 1, 1, 1, 60000},
		"v6_one_48":         {200000, 60000, 256, 1, 60000},
		"v6_spoofed":        {200000, 200000, 200000, 60000, 60000},
		"v6_beside_client":  {1, 1, 1, 1, 1},
		"v6_random_payload": {1, 1, 1, 1, 1},
		"stolen_addresses":  {20, 20, 20, -1, 20},
		"reflection":        {200000, 200000, 200000, 60000, 1},
	} {
		s, err := Lookup(name)
		if err != nil {
			t.Fatal(err)
		}
		hosts, identities, nets, wide, ports := map[Source]bool{}, map[uint32]bool{}, map[uint32]bool{}, map[uint32]bool{}, map[uint16]bool{}
		legit := map[Source]bool{}
		payloads := map[uint32]bool{}
		for _, p := range s.Shortened().Trace(2).All() {
			if p.Class != Attack {
				legit[p.Src] = true
				continue
			}
			hosts[p.Src], identities[p.Src.Identity], nets[p.Src.Identity>>8], wide[p.Src.Identity>>16] = true, true, true, true
			ports[p.SrcPort], payloads[p.Payload] = true, true
		}
		atLeast := func(what string, got, want int) {
			// Large numbers are reached approximately by random draws; the others are exact.
			if want >= 0 && got != want && (want < 5000 || got < want) {
				t.Errorf("%s: %d %s, want %d", name, got, what, want)
			}
		}
		atLeast("hosts", len(hosts), want.hosts)
		atLeast("identities", len(identities), want.identities)
		atLeast("/24", len(nets), want.slash24)
		atLeast("/16", len(wide), want.slash16)
		atLeast("ports", len(ports), want.ports)
		if random := len(payloads) > 1000; random != (name == "v6_random_payload") {
			t.Errorf("%s: %d payloads", name, len(payloads))
		}
		if name == "v6_beside_client" {
			beside := false
			for c := range legit {
				beside = beside || identities[c.Identity] && !hosts[c]
			}
			if !beside {
				t.Error("no client shares its /64 with the attacker")
			}
		}
	}
}

// The same seed repeats a trace exactly, in batches of any size. Another seed gives another trace.
func TestSeeds(t *testing.T) {
	s, err := Lookup("changing")
	if err != nil {
		t.Fatal(err)
	}
	s.To = s.From + 2*second
	all := s.Trace(5).All()
	if len(all) < 100_000 {
		t.Fatalf("%d packets", len(all))
	}
	tr, part := s.Trace(5), make([]Packet, 777)
	var again []Packet
	for n := tr.Next(part); n > 0; n = tr.Next(part) {
		again = append(again, part[:n]...)
	}
	if !slices.Equal(all, again) {
		t.Error("the same seed gave a different trace")
	}
	for _, skip := range []time.Duration{0, s.From / 2, s.From, s.From + second/2, s.To} {
		tr := s.Trace(5)
		tr.Skip(skip)
		at, _ := slices.BinarySearchFunc(all, tr.Start()+uint64(skip), func(p Packet, at uint64) int { return cmp.Compare(p.At, at) })
		if !slices.Equal(tr.All(), all[at:]) {
			t.Errorf("the trace after %s is different", skip)
		}
	}
	other := s.Trace(6).All()
	if len(other) == len(all) && slices.Equal(all[:1000], other[:1000]) {
		t.Error("another seed gave the same trace")
	}
}

// Three seconds of a million packets a second take far less than a second.
func BenchmarkMillionPPS(b *testing.B) {
	s, err := Lookup("spoofed_1m")
	if err != nil {
		b.Fatal(err)
	}
	packets := make([]Packet, batch)
	for b.Loop() {
		total := 0
		t := s.Trace(1)
		for n := t.Next(packets); n > 0; n = t.Next(packets) {
			total += n
		}
		if total < 3_000_000 {
			b.Fatal(total)
		}
	}
}

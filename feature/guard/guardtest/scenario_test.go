// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"slices"
	"testing"

	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/feature/guard/scenario"
	"github.com/weir-project/weir/kernel/probe"
)

// need skips if the kernel lacks a need of all guards.
func need(t testing.TB) {
	t.Helper()
	if err := probe.CompareAndSwap.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
}

func newGuard(t testing.TB, o Options) *Guard {
	t.Helper()
	g, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	return g
}

// chosen are the scenarios for checking every change: one of each kind, and the worst ones. The
// lab's experiment guard runs all of them. Scenarios with true also run in the kernel matrix, on
// emulated machines.
var chosen = map[string]bool{"single_flow": true, "reflection": false, "spoofed_50k": false, "pulsing_2000x25": false,
	"slow_2000x25": false, "slow_first": false, "new_net24": false, "flash_crowd": false, "limit_100": false, "v6_beside_client": true,
	"large_1_spoofed": true, "large_4_2000x25": false, "large_zipf_2000x25": false, "slow_2x180": false}

// TestScenarios checks scenarios against the promises of the README.
func TestScenarios(t *testing.T) {
	need(t)
	for name, quick := range chosen {
		if testing.Short() && !quick {
			continue
		}
		t.Run(name, func(t *testing.T) {
			s, err := scenario.Lookup(name)
			if err != nil {
				t.Fatal(err)
			}
			s = s.Shortened()
			o, err := scenario.Run(s, 1, newGuard(t, Options{Limit: s.Limit, IPv6: s.IPv6, Seed: 1}))
			if err != nil {
				t.Fatal(err)
			}
			if s.LegitCounts && !(o.LegitKept >= 0.98) {
				t.Errorf("%.4f of the established clients' packets passed, want 0.98", o.LegitKept)
			}
			if !(o.AcceptedOverLimitWorstSecond <= 1.12) {
				t.Errorf("%.3f of the limit passed in one second", o.AcceptedOverLimitWorstSecond)
			}
			if name == "new_net24" && !(o.NewcomersKept >= 0.99) {
				t.Errorf("%.4f of the newcomers' packets passed, want 0.99", o.NewcomersKept)
			}
		})
	}
}

// TestKnownSourcesKept checks each single source known before a flood for at most a tenth of lost
// packets. This includes a resolver without room for a reservation.
func TestKnownSourcesKept(t *testing.T) {
	need(t)
	s, err := scenario.Lookup("resolvers_14s")
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(4) {
		s.IPv6 = seed%2 == 1
		o, err := scenario.Run(s, seed, newGuard(t, Options{Limit: s.Limit, IPv6: s.IPv6, Seed: seed + 1, Batch: true}))
		if err != nil {
			t.Fatal(err)
		}
		if !(o.MinClient >= 0.9) {
			t.Errorf("seed %d, IPv6 %t: the worst known source kept %.3f, want 0.9", seed, s.IPv6, o.MinClient)
		}
	}
}

// TestColdStart applies guards during a flood. From the fifth second on, clients below the limit
// keep their packets, even if they share a network.
func TestColdStart(t *testing.T) {
	need(t)
	for _, s := range scenario.All() {
		if !s.ColdStart {
			continue
		}
		s = s.Shortened()
		for _, s.IPv6 = range []bool{false, true} {
			o, err := scenario.Run(s, 1, newGuard(t, Options{Limit: s.Limit, IPv6: s.IPv6, Seed: 1, Batch: true}))
			if err != nil {
				t.Fatal(err)
			}
			if !(o.NewcomersKept >= 0.95) {
				t.Errorf("%s, IPv6 %t: clients kept %.4f, want 0.95", s.Name, s.IPv6, o.NewcomersKept)
			}
		}
	}
}

// TestStatusNames floods a guard from everywhere, and from one host. Status names that host, its
// networks and its port. It names no source with a packet or two.
func TestStatusNames(t *testing.T) {
	need(t)
	for name, want := range map[string][]string{"spoofed_50k": nil, "single_flow": {"from 5.6.7.8", "from 5.6.7.0/24", "from 5.6.0.0/16", "source port 999"}} {
		s, err := scenario.Lookup(name)
		if err != nil {
			t.Fatal(err)
		}
		s = s.Shortened()
		g := newGuard(t, Options{Limit: s.Limit, Seed: 1, Batch: true})
		if _, err := scenario.Run(s, 1, g); err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, p := range g.Counts(s.Trace(1).Start() + uint64(s.To)).Top {
			if p.Level != "destination" {
				names = append(names, p.String())
			}
		}
		slices.Sort(names)
		slices.Sort(want)
		if !slices.Equal(names, want) {
			t.Errorf("%s: status names %q, want %q", name, names, want)
		}
	}
}

// TestHooksAgree sends the same packets to three hooks, with guards of one secret: all verdicts are
// equal.
func TestHooksAgree(t *testing.T) {
	need(t)
	for _, name := range []string{"changing", "v6_beside_client"} {
		s, err := scenario.Lookup(name)
		if err != nil {
			t.Fatal(err)
		}
		s = s.Shortened()
		for _, ipv6 := range []bool{false, true} {
			if s.IPv6 && !ipv6 || testing.Short() && name != "v6_beside_client" {
				continue
			}
			var guards []*Guard
			for _, h := range []guard.Hook{guard.Socket, guard.Cgroup, guard.XDP} {
				guards = append(guards, newGuard(t, Options{Limit: s.Limit, IPv6: ipv6, Hook: h, Seed: 7}))
			}
			agree(t, s, guards)
		}
	}
}

func agree(t *testing.T, s scenario.Scenario, guards []*Guard) {
	t.Helper()
	trace := s.Trace(7)
	packets := make([]scenario.Packet, 4096)
	verdicts := make([][]bool, len(guards))
	compared, passed := 0, 0
	for {
		n := trace.Next(packets)
		if n == 0 {
			break
		}
		for i, g := range guards {
			verdicts[i] = make([]bool, n)
			if err := g.Decide(packets[:n], verdicts[i]); err != nil {
				t.Fatal(err)
			}
		}
		for j := range n {
			for i := range guards {
				if verdicts[i][j] != verdicts[0][j] {
					t.Fatalf("%s: packet %d: hook %d returns %v, hook 0 returns %v", s.Name, compared+j, i, verdicts[i][j], verdicts[0][j])
				}
			}
			if verdicts[0][j] {
				passed++
			}
		}
		compared += n
	}
	if passed == 0 || passed == compared {
		t.Fatalf("%s: %d of %d packets passed: the test compares nothing", s.Name, passed, compared)
	}
}

// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/compile/running"
	"github.com/weir-project/weir/internal/nstest"
)

var hooks = []compile.Hook{compile.Socket, compile.XTBPF, compile.TC, compile.XDP, compile.Netfilter}

// needHook skips if the kernel lacks a need of the hook.
func needHook(t testing.TB, h compile.Hook) {
	t.Helper()
	nstest.NeedRoot(t)
	if h == compile.Netfilter {
		if err := running.DynptrSkb.Check(); err != nil {
			t.Skip("need: kernel", err)
		}
	}
}

// rounds lowers the number of rounds with -short, for the matrix of kernels, to one of each kind.
func rounds(n int) int {
	if testing.Short() {
		return min(n, 3)
	}
	return n
}

func TestRandom(t *testing.T) {
	for _, h := range hooks {
		t.Run(h.String(), func(t *testing.T) {
			needHook(t, h)
			seed := uint64(time.Now().UnixNano())
			r := rand.New(rand.NewPCG(seed, 1))
			var all Result
			for i := range rounds(9) {
				res, err := Batch{Hook: h, Rules: 24, Packets: 500, Plain: i%3 == 1, Decide: i%3 == 2}.Run(r)
				if err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				all.Add(res)
			}
			report(t, seed, all)
		})
	}
}

// A few rules are compiled once for packets with readable and unreadable headers.
func TestFew(t *testing.T) {
	for _, h := range hooks {
		t.Run(h.String(), func(t *testing.T) {
			needHook(t, h)
			seed := uint64(time.Now().UnixNano())
			r := rand.New(rand.NewPCG(seed, 7))
			var all Result
			for i := range rounds(16) {
				res, err := Batch{Hook: h, Rules: 4 + r.IntN(13), Packets: 500, Plain: i%4 == 1, Decide: true}.Run(r)
				if err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				all.Add(res)
			}
			report(t, seed, all)
		})
	}
}

func report(t *testing.T, seed uint64, all Result) {
	t.Helper()
	for i, e := range all.Refusals {
		if i < 1 {
			t.Errorf("seed %d: refused: %v", seed, e)
		}
	}
	for i, d := range all.Disagreements {
		if i < 10 {
			t.Errorf("seed %d: %s", seed, d)
		}
	}
	t.Logf("%d pairs, %d instructions, %d disagreements, %d refusals", all.Pairs, all.Instructions, len(all.Disagreements), len(all.Refusals))
}

// BenchmarkPairs compares a million pairs and more, like the lab.
func BenchmarkPairs(b *testing.B) {
	nstest.NeedRoot(b)
	r := rand.New(rand.NewPCG(1, 5))
	pairs := 0
	for b.Loop() {
		res, err := Batch{Hook: compile.TC, Rules: 48, Packets: 2000}.Run(r)
		if err != nil {
			b.Fatal(err)
		}
		if len(res.Disagreements)+len(res.Refusals) > 0 {
			b.Fatal(res.Disagreements, res.Refusals)
		}
		pairs += res.Pairs
	}
	b.ReportMetric(float64(pairs)/b.Elapsed().Seconds(), "pairs/s")
}

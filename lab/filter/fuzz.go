// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/filtertest"
)

// shapes are the kinds of batches, used in turn. Rates count each packet, so few expressions have rates.
var shapes = []filtertest.Batch{
	{Rules: 24, Packets: 1500},
	{Rules: 40, Packets: 1000, Kinds: filtertest.Kinds{Lists: true}, Segments: 1},
	{Rules: 24, Packets: 1500, Decide: true},
	{Rules: 40, Packets: 1000, Kinds: filtertest.Kinds{Lists: true}},
	{Rules: 24, Packets: 1000, Kinds: filtertest.Kinds{Costs: true}},
	{Rules: 24, Packets: 400, Kinds: filtertest.Kinds{Rates: true}},
}

var fuzzHooks = []compile.Hook{compile.XDP, compile.TC, compile.XTBPF, compile.Netfilter, compile.Socket}

// fuzz compares programs with the interpreter on random expressions and random packets. Most pairs are
// kernel test runs of packets impossible on a network.
func (x *experiment) fuzz(ctx context.Context) error {
	x.say("random expressions and random packets, many malformed: program and interpreter on %d pairs", x.pairs)
	var mu sync.Mutex
	var all filtertest.Result
	var errs []error
	next := 0
	deadline := time.Now().Add(x.fuzzFor)
	take := func() (n int, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		next++
		// Every shape runs at least once at every hook.
		enough := all.Pairs >= x.pairs || time.Now().After(deadline)
		return next - 1, len(errs) == 0 && ctx.Err() == nil && !(enough && next > len(fuzzHooks))
	}
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				n, ok := take()
				if !ok {
					return
				}
				b := shapes[n/len(fuzzHooks)%len(shapes)]
				b.Hook = fuzzHooks[n%len(fuzzHooks)]
				res, err := b.Run(rand.New(rand.NewPCG(x.env.Seed, uint64(n))))
				mu.Lock()
				all.Add(res)
				if err != nil {
					errs = append(errs, fmt.Errorf("batch %d at %s: %w", n, b.Hook, err))
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil || ctx.Err() != nil {
		return errors.Join(err, ctx.Err())
	}
	x.result.Set("fuzz_pairs", float64(all.Pairs))
	x.result.Set("fuzz_instructions", float64(all.Instructions))
	x.result.Set("fuzz_disagreements", float64(len(all.Disagreements)))
	x.result.Set("verifier_refusals", float64(len(all.Refusals)))
	for _, d := range all.Disagreements {
		x.result.Note("%s", d)
	}
	for _, err := range all.Refusals {
		x.result.Note("%v", err)
	}
	return nil
}

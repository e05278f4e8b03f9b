// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/table"
)

const (
	goSample  = 100_000 // keys looked up by package table itself
	checkStep = 1 << 15 // keys of one run: on most kernels a program runs without preemption to its end
)

// build fills both, and returns the seconds of each: with the table's own sort, and with prepared keys for
// LPM_TRIE.
func (b *bench) build(entries []table.Entry, tableFirst bool) (timing, error) {
	var t timing
	keys := newBatch(b.family, entries)
	fill := []func() error{
		func() error { return timed(&t.table, func() error { return b.table.Replace(entries) }) },
		func() error { return timed(&t.trie, func() error { return keys.fill(b.trie) }) },
	}
	if !tableFirst {
		fill[0], fill[1] = fill[1], fill[0]
	}
	for _, f := range fill {
		runtime.GC() // earlier garbage is not charged to the next part
		if err := f(); err != nil {
			return t, err
		}
	}
	return t, nil
}

// timed adds the duration of f in seconds.
func timed(seconds *float64, f func() error) error {
	begin := time.Now()
	err := f()
	*seconds += time.Since(begin).Seconds()
	return err
}

// ask looks keys up in a loaded set: first it compares the results of both, then their times.
func (x *experiment) ask(ctx context.Context, b *bench, s set, entries []table.Entry) error {
	for _, choice := range s.choices {
		name := s.name(b.family, choice)
		r := x.rand(name)
		keys := keysWithin(b.family, entries, choice == zipf, r)
		x.say("%s: comparing the results of both for %d keys, and for %d with flipped bits", name, x.keys, x.flipped)
		if err := x.compare(ctx, b, name, flipped(b.family, keys, r), x.flipped, r); err != nil {
			return err
		}
		if err := x.compare(ctx, b, name, keys, x.keys, r); err != nil {
			return err
		}
		if x.rounds == 0 {
			continue
		}
		x.say("%s: %d rounds of %d lookups each", name, x.rounds, x.lookups)
		speedup, err := x.race(ctx, b, name, latency, x.rounds, s.prefixes == million && choice == uniform)
		if err != nil {
			return err
		}
		if s.prefixes == 10_000 {
			x.speedup10k = append(x.speedup10k, speedup)
		}
		if s.prefixes < million && x.env.Size != lab.Full {
			continue // half of the time, without a claim
		}
		if _, err := x.race(ctx, b, name, independent, x.independent, false); err != nil {
			return err
		}
	}
	if s.prefixes == million {
		mb, err := b.tableMemory()
		if err != nil {
			return err
		}
		x.result.Set(fmt.Sprintf("memory_mb_%s_1m", b.family), mb)
		x.result.Set(fmt.Sprintf("pages_mb_%s_1m", b.family), float64(b.table.Stats().PageBytes)/1e6)
	}
	return nil
}

// compare looks up the first n keys by all means: table and LPM_TRIE in BPF, and a sample of them in Go.
func (x *experiment) compare(ctx context.Context, b *bench, name string, keys []uint32, n int, r *rand.Rand) error {
	if err := b.setKeys(keys); err != nil {
		return err
	}
	answers := make([]byte, 8*n)
	for i := range answers {
		answers[i] = 0xff // no value: an unwritten entry is not taken for an answer
	}
	if _, err := b.answers.WriteAt(answers, 0); err != nil {
		return err
	}
	for start := 0; start < n; start += checkStep {
		if _, err := b.run(fmt.Sprintf("check%d", b.family), start, min(checkStep, n-start)); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if _, err := b.answers.ReadAt(answers, 0); err != nil {
		return err
	}
	words := b.family.words()
	key := func(i int) []uint32 { return keys[i*words : (i+1)*words] }
	for i := range n {
		inTable, inTrie := binary.NativeEndian.Uint32(answers[8*i:]), binary.NativeEndian.Uint32(answers[8*i+4:])
		if inTable != inTrie || inTrie > table.MaxValue {
			x.unequal++
			x.result.Note("%s: %v is %d in the table and %d in LPM_TRIE", name, address(b.family, key(i)), inTable, inTrie)
		}
		if inTrie == 0 {
			x.missed++
		}
	}
	x.compared += n
	for range min(goSample, n) {
		i := r.IntN(n)
		a, inTrie := address(b.family, key(i)), binary.NativeEndian.Uint32(answers[8*i+4:])
		if v, ok := b.table.Lookup(a); v != inTrie || ok != (inTrie != 0) {
			x.unequal++
			x.result.Note("%s: %v is %d (%t) by Lookup and %d in LPM_TRIE", name, a, v, ok, inTrie)
		}
	}
	return nil
}

// Before each timed run the same program runs untimed, over other keys, for this time or this number of
// lookups.
const (
	warmTime    = 50 * time.Millisecond
	warmLookups = keyCount / 2
	warmStep    = 1 << 14
)

// warm brings the caches into the state of this way's lookups. Otherwise a short run would pay for the
// other way's evictions.
func (b *bench) warm(name string, start int) error {
	begin := time.Now()
	for done := 0; done < warmLookups && time.Since(begin) < warmTime; done += warmStep {
		if _, err := b.run(name, (start+done)%keyCount, warmStep); err != nil {
			return err
		}
	}
	return nil
}

// race makes both look up the same keys in turn, so a slow machine slows both, and sets the metrics. Each
// round continues where the previous one ended, because a few repeated keys would fit the caches. With
// ceiling, the trie is also compared with a single read of a line.
func (x *experiment) race(ctx context.Context, b *bench, name, mode string, rounds int, ceiling bool) (float64, error) {
	ways := []string{ours, theirs}
	if ceiling {
		ways = append(ways, touch)
	}
	ns := make([][]float64, len(ways))
	var ratios, ceilings []float64
	for round := range rounds {
		got := make([]found, len(ways))
		for turn := range ways {
			way := (turn + round) % len(ways)
			name, start := program(ways[way], b.family, mode), round*x.lookups%keyCount
			err := b.warm(name, start+x.lookups)
			if err == nil {
				got[way], err = b.run(name, start, x.lookups)
			}
			if err != nil {
				return 0, err
			}
			ns[way] = append(ns[way], got[way].ns)
		}
		if got[0].checksum != got[1].checksum || got[0].hits != got[1].hits || got[0].hits == 0 {
			x.unequal++
			x.result.Note("%s, %s: the table found %d of %d keys, checksum %x, and LPM_TRIE %d, checksum %x",
				name, mode, got[0].hits, x.lookups, got[0].checksum, got[1].hits, got[1].checksum)
		}
		ratios = append(ratios, got[1].ns/got[0].ns)
		if ceiling {
			ceilings = append(ceilings, got[1].ns/got[2].ns)
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
	}
	metric, speedup := map[string]string{latency: "", independent: "independent_"}[mode], median(ratios)
	x.result.Set(metric+"speedup_"+name, speedup)
	for i, way := range ways {
		x.result.Set(metric+"ns_"+way+"_"+name, median(ns[i]))
	}
	if ceiling {
		x.result.Set("ceiling_"+name, median(ceilings))
	}
	return speedup, nil
}

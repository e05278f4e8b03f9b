// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/table"
)

const (
	around  = 10_000  // prefixes in the table besides the changing ones
	burst   = 1 << 14 // lookups of one run of a probe: an endless program would block updates
	renewed = 20      // number of replacements of the whole table by its own content
)

// torn holds BPF's results while tables changed, in both families.
type torn struct {
	updates, lookups, torn uint64
	flipped, unseen        int // probes with a changing value, and the part with a value never found
	stale                  int // probes with a wrong value at the end
}

func (t *torn) report(r *lab.Result) {
	r.Set("torn_updates", float64(t.updates))
	r.Set("torn_lookups", float64(t.lookups))
	r.Set("torn_stale", float64(t.stale))
	if t.unseen*2 < t.flipped { // otherwise hardly any lookup met a change, and nothing is proved
		r.Set("torn_reads", float64(t.torn)+float64(t.stale))
	} else {
		r.Note("%d changing probes, %d of them found with one value only", t.flipped, t.unseen)
	}
}

// tear looks addresses up by BPF on one CPU while everything around them changes on another.
func (x *experiment) tear(ctx context.Context, f family) error {
	b, err := load(f, 1, 8)
	if err != nil {
		return err
	}
	defer b.close()
	r := x.rand("torn", f)
	s := arenas[f].stage(r)
	entries := s.fixed
	for _, e := range sparse(f, around, r) {
		if !e.Prefix.Overlaps(arenas[f].space) {
			entries = append(entries, e)
		}
	}
	if err := b.table.Replace(entries); err != nil {
		return err
	}
	if err := b.fill(s.probes); err != nil {
		return err
	}
	x.say("%s: %d updates while BPF looks up the changing addresses", f, x.flips/2)
	stop := make(chan error, 1)
	var done atomic.Bool
	go func() { stop <- b.watch(ctx, &done) }()
	err = s.flip(ctx, b.table, x.flips/2, r)
	done.Store(true)
	if err = errors.Join(err, <-stop); err != nil {
		return err
	}
	x.torn.updates += uint64(x.flips / 2)
	return x.count(b, s)
}

// watch runs probes on the last CPU until done is set.
func (b *bench) watch(ctx context.Context, done *atomic.Bool) error {
	runtime.LockOSThread() // never unlocked: the thread is bound to a CPU and must not serve other goroutines
	var set unix.CPUSet
	set.Set(runtime.NumCPU() - 1)
	_ = unix.SchedSetaffinity(0, &set) // some containers refuse: it then runs on any CPU
	for !done.Load() && ctx.Err() == nil {
		if _, err := b.run(fmt.Sprintf("probe%d", b.family), 0, burst); err != nil {
			return err
		}
	}
	return nil
}

// flip makes n updates, half of them visible to a probe.
func (s *stage) flip(ctx context.Context, t *table.Table, n int, r *rand.Rand) error {
	for i := range n {
		toggles := s.seen
		if r.IntN(2) == 0 {
			toggles = s.beside
		}
		if err := toggles[r.IntN(len(toggles))].flip(t); err != nil {
			return err
		}
		if i%max(n/renewed, 1) == 0 {
			if err := t.Replace(slices.Collect(t.All())); err != nil {
				return fmt.Errorf("replace the table by its own content: %w", err)
			}
		}
		if i%1000 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// fill writes the probes to the program's map: struct probe of bench.bpf.c.
const probeSize = 56

func (b *bench) fill(probes []probe) error {
	var text []byte
	for _, p := range probes {
		one := make([]byte, probeSize)
		for i, w := range addrWords(p.address) {
			binary.NativeEndian.PutUint32(one[4*i:], w)
		}
		binary.NativeEndian.PutUint32(one[16:], p.legal[0])
		binary.NativeEndian.PutUint32(one[20:], p.legal[1])
		text = append(text, one...)
	}
	if _, err := b.probes.WriteAt(text, 0); err != nil {
		return fmt.Errorf("write %d probes: %w", len(probes), err)
	}
	return b.c.Variables["probe_count"].Set(uint32(len(probes)))
}

// count sums the program's results, and checks every probe against the last update.
func (x *experiment) count(b *bench, s *stage) error {
	text := make([]byte, probeSize*len(s.probes))
	if _, err := b.probes.ReadAt(text, 0); err != nil {
		return err
	}
	for i, p := range s.probes {
		one := text[probeSize*i:]
		seen := [2]uint64{binary.NativeEndian.Uint64(one[32:]), binary.NativeEndian.Uint64(one[40:])}
		wrong := binary.NativeEndian.Uint64(one[48:])
		x.torn.lookups += seen[0] + seen[1] + wrong
		x.torn.torn += wrong
		if wrong > 0 {
			x.result.Note("%s was %d in %d lookups, legal is %v (%s)",
				p.address, binary.NativeEndian.Uint32(one[24:]), wrong, p.legal, p.about)
		}
		if p.legal[0] != p.legal[1] {
			x.torn.flipped++
			if seen[0] == 0 || seen[1] == 0 {
				x.torn.unseen++
			}
		}
		if v, _ := b.table.Lookup(p.address); v != p.now() {
			x.torn.stale++
			x.result.Note("%s is %d in the end, want %d (%s)", p.address, v, p.now(), p.about)
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	tables "github.com/weir-project/weir/lab/table"
	"github.com/weir-project/weir/lab/topo"
	"github.com/weir-project/weir/table"
)

const (
	listRule     = "ip.src in $bogons"
	listName     = "bogons"
	listSegments = 32 // MiB, like weir's size for a list of a million
	trieMap      = "lab_trie"
	// listPackets is the number of packets of a round. Their addresses continue where the previous round
	// ended.
	listPackets = 20_000
)

// finder is one way to search the list: weir's program of the rule, with another lookup function.
type finder struct {
	name string
	c    *kernel.Collection
	ns   *netns.Handle
	each []float64 // ns of the program, by round
}

// measureList compares the program of a rule with a list on a table with the same program on a BPF
// LPM_TRIE, at tcx. The packets have random source addresses, half of them in the list. The next address
// does not depend on the result, but the kernel's whole work on a packet lies between two lookups. The
// kernel measures the program's time.
func (x *experiment) measureList(ctx context.Context) error {
	x.say("a list of %d prefixes: the same program on weir's table and on LPM_TRIE", x.list)
	r := rand.New(rand.NewPCG(x.env.Seed, 4))
	var entries []table.Entry
	if err := orLeave(ctx, func() error { entries = tables.Sparse4(x.list, r); return nil }); err != nil {
		return err
	}
	finders, err := x.finders(ctx, entries)
	for _, f := range finders {
		defer f.c.Close()
	}
	if err != nil {
		return err
	}
	src, err := x.newSource("list", among(entries, r))
	if err != nil {
		return err
	}
	defer src.close()
	if err := findSame(ctx, finders[0], finders[1], src); err != nil {
		return x.unlessLive(err, "no comparison of lists")
	}
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return fmt.Errorf("enable program statistics of the kernel (Linux 5.8): %w", err)
	}
	defer stats.Close()
	if err := inTurns(ctx, x.rounds, x.costFor, len(finders), func(way int) error { return finders[way].round(src) }); err != nil {
		return err
	}
	x.listCosts(finders)
	return nil
}

// among draws addresses, half of them within prefixes of the list, with equal probability for each prefix.
func among(entries []table.Entry, r *rand.Rand) func() netip.Addr {
	return func() netip.Addr {
		any := r.Uint32()
		if r.IntN(2) == 0 {
			p := pick(r, entries).Prefix
			a := p.Addr().As4()
			any = be.Uint32(a[:]) | any&uint32(1<<(32-p.Bits())-1)
		}
		return netip.AddrFrom4([4]byte(be.AppendUint32(nil, any)))
	}
}

// finders loads the programs, each in its own namespace: weir's table, LPM_TRIE, a function without
// results, and an empty program. The last shows the cost of the measurement.
func (x *experiment) finders(ctx context.Context, entries []table.Entry) (all []*finder, err error) {
	for _, name := range []string{"table", "trie", "nothing", "empty"} {
		f := &finder{name: name}
		if f.c, err = loadFinder(ctx, name, entries); err != nil {
			return all, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, f)
		if f.ns, _, err = x.env.Namespace("list-" + name); err != nil {
			return all, err
		}
		if err := topo.Addresses(f.ns); err != nil {
			return all, err
		}
		detach, err := attachLinks(f.ns, f.c.Programs[compile.ProgramName], kernel.TCX{Ifindex: 1, Device: "lo"})
		if err != nil {
			return all, err
		}
		x.env.OnClose(detach)
	}
	return all, nil
}

func loadFinder(ctx context.Context, name string, entries []table.Entry) (*kernel.Collection, error) {
	p, err := compile.Compile([]compile.Rule{{Name: "list", Match: expr.MustParse(listRule), Action: compile.Count}},
		// The packet is dropped with any result: the rest of its path is not measured.
		compile.Options{Hook: compile.TC, Default: compile.Drop, Lists: map[string]compile.List{listName: {Segments: listSegments}}})
	if err != nil {
		return nil, err
	}
	switch name {
	case "trie":
		p.Spec.Maps[trieMap] = &ebpf.MapSpec{Name: trieMap, Type: ebpf.LPMTrie, KeySize: 8, ValueSize: 4, MaxEntries: uint32(len(entries)), Flags: unix.BPF_F_NO_PREALLOC}
		err = replaceLookup(p, trieLookup)
	case "nothing":
		err = replaceLookup(p, asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()})
	case "empty":
		const shot = 2 // TC_ACT_SHOT
		p.Spec.Programs[compile.ProgramName].Instructions = asm.Instructions{asm.Mov.Imm(asm.R0, shot), asm.Return()}
	}
	if err != nil {
		return nil, err
	}
	c, err := kernel.Load(p.Spec, []string{compile.ProgramName}, nil)
	if err != nil {
		return nil, err
	}
	switch name {
	case "table":
		err = orLeave(ctx, func() error { return fillTable(c, p.Tables[listName], entries) })
	case "trie":
		err = fillTrie(ctx, c.Maps[trieMap], entries)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// trieLookup is the function of LPM_TRIE. Its input is an address in host byte order; it returns 0 for no
// prefix.
var trieLookup = asm.Instructions{
	asm.HostTo(asm.BE, asm.R1, asm.Word),
	asm.StoreMem(asm.RFP, -4, asm.R1, asm.Word),
	asm.StoreImm(asm.RFP, -8, 32, asm.Word),
	asm.LoadMapPtr(asm.R1, 0).WithReference(trieMap),
	asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -8),
	asm.FnMapLookupElem.Call(),
	asm.Instruction{OpCode: asm.JEq.Op(asm.ImmSource), Dst: asm.R0, Offset: 1}, // skips the load
	asm.LoadMem(asm.R0, asm.R0, 0, asm.Word),
	asm.Return(),
}

// replaceLookup replaces the function for IPv4 lookups in the list.
func replaceLookup(p *compile.Program, by asm.Instructions) error {
	spec := p.Spec.Programs[compile.ProgramName]
	name := p.Tables[listName] + "_four"
	var out asm.Instructions
	in, found := false, false
	for _, ins := range spec.Instructions {
		if s := ins.Symbol(); s != "" {
			// Functions called only by the list's function are removed too: the kernel rejects uncalled
			// functions.
			in = strings.HasPrefix(s, p.Tables[listName]+"_")
			if s == name {
				found = true
				body := append(asm.Instructions(nil), by...)
				body[0].Metadata = ins.Metadata // its name and type
				out = append(out, body...)
			}
		}
		if !in {
			out = append(out, ins)
		}
	}
	if !found {
		return fmt.Errorf("the program has no function %s", name)
	}
	spec.Instructions = out
	return nil
}

func fillTable(c *kernel.Collection, name string, entries []table.Entry) error {
	m, err := table.Find(c.Maps, name)
	if err != nil {
		return err
	}
	t, err := table.Open(m)
	if err != nil {
		return err
	}
	return errors.Join(t.Replace(entries), t.Close())
}

func fillTrie(ctx context.Context, m *ebpf.Map, entries []table.Entry) error {
	type key struct {
		Bits    uint32
		Address [4]byte
	}
	keys, values := make([]key, len(entries)), make([]uint32, len(entries))
	for i, e := range entries {
		keys[i], values[i] = key{uint32(e.Prefix.Bits()), e.Prefix.Addr().As4()}, e.Value
	}
	const atOnce = 1 << 16
	for at := 0; at < len(keys); at += atOnce {
		to := min(at+atOnce, len(keys))
		if _, err := m.BatchUpdate(keys[at:to], values[at:to], nil); err != nil {
			return fmt.Errorf("fill LPM_TRIE: %w", err)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// findSame sends the same packets by both ways. Both must find the same number in the list.
func findSame(ctx context.Context, a, b *finder, src *source) error {
	const packets, atOnce = manyAddresses / 4, manyAddresses / 32
	var found [2]uint64
	for i, f := range []*finder{a, b} {
		if err := src.c.Variables["next"].Set(uint32(0)); err != nil {
			return err
		}
		for range packets / atOnce {
			if err := errors.Join(ctx.Err(), f.ns.Do(func() error { return src.send(atOnce) })); err != nil {
				return err
			}
		}
		counts, err := counter{f.c.Maps[compile.CountsName], 1}.read()
		if err != nil {
			return err
		}
		if n, err := src.sent(); err != nil || n != packets {
			return errors.Join(err, fmt.Errorf("%d packets sent, want %d: interrupted by a signal", n, packets))
		}
		found[i] = counts[0]
	}
	if found[0] != found[1] || found[0] == 0 {
		return fmt.Errorf("among the same packets %s finds %d in the list, and %s %d: not comparable", a.name, found[0], b.name, found[1])
	}
	return nil
}

// round measures one round, after a shorter one to bring the caches into this way's state.
func (f *finder) round(src *source) error {
	return f.ns.Do(func() error {
		if err := src.send(listPackets / 4); err != nil {
			return err
		}
		p := f.c.Programs[compile.ProgramName]
		before, err := p.Stats()
		if err != nil {
			return err
		}
		if err := src.send(listPackets); err != nil {
			return err
		}
		after, err := p.Stats()
		if err != nil {
			return err
		}
		runs := after.RunCount - before.RunCount
		if runs < listPackets {
			return fmt.Errorf("the kernel counted %d runs, want %d", runs, listPackets)
		}
		f.each = append(f.each, float64(after.Runtime-before.Runtime)/float64(runs))
		return nil
	})
}

// listCosts sets the metrics. A ratio is the median of the rounds' ratios, for the whole program without
// the cost of measuring, and for the lookup alone. The lookup is the program's time minus the time of the
// program without results.
func (x *experiment) listCosts(finders []*finder) {
	x.result.Set("list_rounds", float64(len(finders[0].each)))
	for _, f := range finders {
		x.result.Set("ns_list_1m_"+f.name, median(f.each))
	}
	whole, lookup := make([]float64, len(finders[0].each)), make([]float64, len(finders[0].each))
	for i := range whole {
		ours, trie, nothing, empty := finders[0].each[i], finders[1].each[i], finders[2].each[i], finders[3].each[i]
		whole[i] = (ours - empty) / (trie - empty)
		lookup[i] = (ours - nothing) / (trie - nothing)
	}
	x.result.Set("list_1m_ns_ratio_lpm_trie", median(whole))
	x.result.Set("list_1m_ns_ratio_lpm_trie_lookup", median(lookup))
}

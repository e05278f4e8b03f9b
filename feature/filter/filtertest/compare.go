// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/compile/running"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// Batch is one comparison: a program of many rules, over many packets.
type Batch struct {
	Hook    compile.Hook
	Rules   int
	Packets int
	Kinds   Kinds // Link is set if the hook has link headers
	// Decide gives rules random actions and compares the deciding one. Otherwise all rules count,
	// so each is compared for each packet.
	Decide bool
	// Segments, unless 0, stores $some in a table.
	Segments int
	Shards   compile.Shards // of the table
	// Plain compiles the program without features of newer kernels.
	Plain bool
}

// Result is the result of comparisons.
type Result struct {
	Pairs         int // of a rule and a packet
	Disagreements []string
	Refusals      []error // by the verifier
	Instructions  int
}

// Add adds another result.
func (r *Result) Add(o Result) {
	r.Pairs += o.Pairs
	r.Disagreements = append(r.Disagreements, o.Disagreements...)
	r.Refusals = append(r.Refusals, o.Refusals...)
	r.Instructions += o.Instructions
}

type prefixes []netip.Prefix

func (l prefixes) Contains(a netip.Addr) bool {
	for _, p := range l {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// sample is a packet as input of the kernel's test run, and as seen by the hook.
type sample struct {
	data []byte
	seen expr.Packet
}

func samples(r *rand.Rand, h compile.Hook, n int) []sample {
	out := make([]sample, n)
	for i := range out {
		switch h {
		case compile.Netfilter:
			b := datagram(r)
			out[i] = sample{b, expr.Packet{Data: b, Layer: expr.Network}}
		case compile.Socket, compile.XTBPF:
			b := runnable(r)
			out[i] = sample{b, expr.Packet{Data: b[14:], Layer: expr.Network}}
		case compile.TC:
			b := runnable(r)
			out[i] = sample{b, expr.Packet{Data: b, Layer: expr.Link}}
		default:
			b := Packet(r)
			out[i] = sample{b, expr.Packet{Data: b, Layer: expr.Link}}
		}
	}
	return out
}

// runnable returns a packet accepted by test runs: they reject packets with an end inside the IPv6
// header.
func runnable(r *rand.Rand) []byte {
	for {
		if b := Packet(r); len(b) >= 54 || b[12] != 0x86 || b[13] != 0xdd {
			return b
		}
	}
}

// Run compares the compiled rules with the interpreter. It returns an error if no comparison was
// possible.
func (b Batch) Run(r *rand.Rand) (Result, error) {
	k := b.Kinds
	k.Link = b.Hook == compile.TC || b.Hook == compile.XDP
	rules := make([]compile.Rule, b.Rules)
	for i := range rules {
		rules[i] = compile.Rule{Name: fmt.Sprint("r", i), Match: Expr(r, k), Action: compile.Count}
		if b.Decide {
			rules[i].Action = pick(r, []compile.Action{compile.Pass, compile.Drop, compile.Count})
		}
	}
	o := Options(b.Hook)
	if b.Plain {
		k, err := compile.Running(b.Hook)
		if err != nil {
			return Result{}, err
		}
		o.Kernel = &running.Kernel{DynptrSkb: k.DynptrSkb, SkbLen: k.SkbLen}
	}
	o.Lists = map[string]compile.List{ListName: {Segments: b.Segments, Shards: b.Shards}}
	if b.Segments == 0 {
		o.Lists[ListName] = compile.List{Prefixes: List}
	}
	return compare(o, rules, samples(r, b.Hook, b.Packets))
}

// fill stores the lists' prefixes in their tables.
func fill(p *compile.Program, c *kernel.Collection, lists map[string]compile.List) error {
	for list, first := range p.Tables {
		shards := lists[list].Shards
		for i, name := range shards.Names(first) {
			m, err := table.Find(c.Maps, name)
			if i > 0 && err != nil {
				continue // no rule uses its family
			} else if err != nil {
				return err
			}
			t, err := table.Open(m)
			if err != nil {
				return err
			}
			for _, n := range List {
				if of := shards.Find(n); of != i && of >= 0 {
					continue
				}
				if err := t.Set(n, 1); err != nil {
					return err
				}
			}
			if err := t.Close(); err != nil {
				return err
			}
		}
	}
	return nil
}

// compare runs rules over packets, in the kernel and in the interpreter.
func compare(o compile.Options, rules []compile.Rule, packets []sample) (res Result, err error) {
	p, err := compile.Compile(rules, o)
	if errors.Is(err, compile.ErrTooLarge) {
		return res, nil // reported before loading: no pairs
	} else if err != nil {
		return res, err
	}
	res.Instructions = len(p.Spec.Programs[compile.ProgramName].Instructions)
	c, err := kernel.Load(p.Spec, []string{compile.ProgramName}, nil)
	if ve, ok := errors.AsType[*ebpf.VerifierError](err); ok {
		res.Refusals = append(res.Refusals, fmt.Errorf("%w\n%+v", err, ve))
		return res, nil
	} else if err != nil {
		return res, err
	}
	defer c.Close()
	if err := fill(p, c, o.Lists); err != nil {
		return res, err
	}
	run := &comparison{rules: rules, prog: c.Programs[compile.ProgramName], counts: c.Maps[compile.CountsName], opts: o}
	if err := run.all(packets); err != nil {
		return res, err
	}
	res.Pairs, res.Disagreements = run.pairs, run.wrong
	return res, nil
}

// Options returns the options for test runs of a hook.
func Options(h compile.Hook) compile.Options {
	o := compile.Options{Hook: h}
	if h == compile.Socket {
		o.Start = compile.IPHeader // start of a test run's skb
	}
	return o
}

type comparison struct {
	rules  []compile.Rule
	prog   *ebpf.Program
	counts *ebpf.Map
	opts   compile.Options
	env    expr.Env
	pairs  int
	wrong  []string
}

// want returns the interpreter's result: the counting rules and the verdict.
func (c *comparison) want(p *expr.Packet) (hits []int, verdict compile.Action) {
	exprs := make([]*expr.Expr, len(c.rules))
	for i, r := range c.rules {
		exprs[i] = r.Match
	}
	verdict = c.opts.Default
	i := c.env.EvalRules(exprs, p, func(i int) expr.Unreadable { return c.rules[i].Unreadable() }, func(i int) bool {
		hits = append(hits, i)
		return c.rules[i].Action != compile.Count
	})
	if i < len(c.rules) {
		return hits, c.rules[i].Action
	}
	return append(hits, i), verdict
}

// all runs all packets and compares the verdict of each. At the end it compares the packet and byte
// counts of each rule. If these differ, it repeats the packets one by one.
func (c *comparison) all(packets []sample) error {
	c.env.Lists = map[string]expr.Set{ListName: prefixes(List)}
	want := make([]compile.Counts, len(c.rules)+1)
	for _, s := range packets {
		hits, verdict := c.want(&s.seen)
		for _, i := range hits {
			want[i].Packets++
			want[i].Bytes += uint64(len(s.seen.Data))
		}
		got, err := c.prog.Run(&ebpf.RunOptions{Data: s.data})
		if err != nil {
			return fmt.Errorf("test run of %d bytes: %w", len(s.data), err)
		}
		if got != c.opts.Hook.Verdict(verdict) {
			c.wrong = append(c.wrong, fmt.Sprintf("%s: verdict %d, want %s: packet %x", c.opts.Hook, int32(got), verdict, s.data))
		}
		c.pairs += len(c.rules)
	}
	got, err := ReadCounts(c.counts, len(want))
	if err != nil {
		return err
	}
	for i := range want {
		if got[i].Packets != want[i].Packets || got[i].Bytes != want[i].Bytes {
			c.wrong = append(c.wrong, c.find(i, packets)...)
		}
	}
	return nil
}

// find returns the packets with different results of a rule's program and the interpreter.
func (c *comparison) find(i int, packets []sample) (wrong []string) {
	what := "the default"
	if i < len(c.rules) {
		what = c.rules[i].Match.String()
	}
	for _, s := range packets {
		before, err := ReadCounts(c.counts, len(c.rules)+1)
		if err != nil {
			return []string{err.Error()}
		}
		if _, err := c.prog.Run(&ebpf.RunOptions{Data: s.data}); err != nil {
			return []string{err.Error()}
		}
		after, err := ReadCounts(c.counts, len(c.rules)+1)
		if err != nil {
			return []string{err.Error()}
		}
		hits, _ := c.want(&s.seen)
		want := false
		for _, h := range hits {
			want = want || h == i
		}
		if got := after[i].Packets > before[i].Packets; got != want {
			wrong = append(wrong, fmt.Sprintf("%s: rule %d %s: program %t, interpreter %t: packet %x", c.opts.Hook, i, what, got, want, s.data))
		}
	}
	if len(wrong) == 0 {
		wrong = append(wrong, fmt.Sprintf("%s: rule %d %s: its counts differ, but no packet alone does", c.opts.Hook, i, what))
	}
	return wrong
}

// ReadCounts reads the first n elements of a program's counts, summed over the CPUs.
func ReadCounts(m *ebpf.Map, n int) ([]compile.Counts, error) {
	out := make([]compile.Counts, n)
	var of []compile.Counts
	for i := range out {
		if err := m.Lookup(uint32(i), &of); err != nil {
			return nil, err
		}
		for _, c := range of {
			out[i].Packets += c.Packets
			out[i].Bytes += c.Bytes
			out[i].Last = max(out[i].Last, c.Last)
		}
	}
	return out, nil
}

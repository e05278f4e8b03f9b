// SPDX-License-Identifier: Apache-2.0

// Package filters tests the filter: one rule file at every hook, verdicts against the interpreter, and rule
// changes under a flood. It compares the cost of a packet with nftables and a BPF LPM_TRIE.
package filters

import (
	"context"
	"errors"
	"time"

	"github.com/weir-project/weir/lab"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "filter",
		Short: "expressions compiled to eBPF at every hook, compared with an interpreter, nftables and LPM_TRIE",
		Run:   run,
		Next: []string{
			"weir-lab run filter --quick --json   the findings for a program",
			"weir filter explain 'udp.dstport == 53 and payload[-5:] == \"xyzzy\"'   compilation of an expression",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	packets int           // for the rule file at each hook
	batches int           // of random expressions at all hooks at once,
	each    int           // packets of each batch
	pairs   int           // random expressions with random packets, compared in test runs
	fuzzFor time.Duration // no new batch of pairs begins after it
	swapFor time.Duration // duration of rule changes under a flood, at each hook
	loads   int           // of ten rules of five terms
	rounds  int           // rounds of cost measurements; 0: none
	costFor time.Duration // limit of each cost measurement
	list    int           // prefixes; 0: the list is not measured
}

var plans = map[lab.Size]plan{
	lab.Full:  {packets: 1000, batches: 40, each: 300, pairs: 5_000_000, fuzzFor: 5 * time.Minute, swapFor: 5 * time.Second, loads: 501, rounds: 101, costFor: time.Minute, list: 1_000_000},
	lab.Quick: {packets: 300, batches: 8, each: 150, pairs: 1_000_000, fuzzFor: 40 * time.Second, swapFor: 800 * time.Millisecond, loads: 151, rounds: 17, costFor: 10 * time.Second, list: 1_000_000},
	lab.Smoke: {packets: 150, batches: 3, each: 100, pairs: 200_000, fuzzFor: 4 * time.Second, swapFor: 400 * time.Millisecond},
}

// experiment is one run.
type experiment struct {
	plan
	env        *lab.Env
	result     *lab.Result
	mismatches int // of verdicts
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	if e.Control {
		return errors.New("filter has no control run: it already compares with others")
	}
	x := &experiment{plan: plans[e.Size], env: e, result: r}
	if err := r.WithStalls(func() error { return x.measure(ctx) }); err != nil {
		return err
	}
	x.claims()
	return nil
}

func (x *experiment) say(format string, a ...any) { x.env.Watch.Log(format, a...) }

func (x *experiment) measure(ctx context.Context) error {
	parts := []func(context.Context) error{x.everyHook, x.evasions, x.sameVerdicts, x.swaps, x.fuzz}
	if x.loads > 0 {
		parts = append(parts, x.compileLoad)
	}
	if x.rounds > 0 {
		parts = append(parts, x.measureCost, x.measureHooks)
	}
	if x.list > 0 {
		parts = append(parts, x.measureList)
	}
	for _, part := range parts {
		if err := part(ctx); err != nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
	}
	return nil
}

// claims evaluates the filter's promises.
func (x *experiment) claims() {
	for _, c := range []struct {
		kind                lab.Kind
		claim, metric, want string
		smoke               bool
	}{
		{lab.Correctness, "one rule file, attached at nftables, a netfilter link, tcx, XDP and a socket", "hooks", "== 5", true},
		{lab.Correctness, "packets with hidden ports past a dropping rule, or past the same rule of nftables", "evasions", "== 0", true},
		{lab.Correctness, "shapes with hidden ports: fragments, extension headers, options, tags, tunnels", "evasion_shapes", ">= 30", true},
		{lab.Correctness, "hooks tested with these shapes", "evasion_hooks", "== 7", true},
		{lab.Correctness, "dropped packets in these shapes outside all rules", "evasion_innocents_lost", "== 0", true},
		{lab.Correctness, "verdicts at a hook, on real packets, different from the interpreter's", "verdict_mismatches", "== 0", true},
		{lab.Correctness, "pairs of a random expression and a random packet", "fuzz_pairs", ">= 1000000", false},
		{lab.Correctness, "disagreements between program and interpreter among these pairs", "fuzz_disagreements", "== 0", true},
		{lab.Correctness, "programs rejected by the verifier", "verifier_refusals", "== 0", true},
		{lab.Correctness, "packets with no rule set, or both, during a replacement", "swap_misverdicts", "== 0", true},
		{lab.Performance, "ms to compile and load ten rules of five terms", "compile_load_ms_p50", "<= 2", false},
		{lab.Performance, "cost of one rule for a packet without a match, relative to nftables at the same hook", "ns_ratio_nft_1rule", "<= 1.0", false},
		{lab.Performance, "cost of 10,000 rules for a packet without a match, relative to nftables' rules", "ns_ratio_nft_10k_rules", "<= 0.05", false},
		{lab.Performance, "the same relative to one verdict map of nftables", "ns_ratio_nft_map_10k", "<= 1.5", false},
		{lab.Performance, "a program with a list of a million prefixes, relative to the same program on LPM_TRIE", "list_1m_ns_ratio_lpm_trie", "<= 0.2", false},
	} {
		if x.env.Size == lab.Smoke && !c.smoke {
			continue
		}
		x.result.Claim(c.kind, c.claim, c.metric, c.want)
	}
	if x.env.Size == lab.Smoke {
		x.result.Claim(lab.Correctness, "pairs of a random expression and a random packet", "fuzz_pairs", ">= 10000")
	}
}

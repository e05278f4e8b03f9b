// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"
	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/feature/filter/pcap"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// TrialResult is the result of trying packets on rules.
type TrialResult struct {
	Packets     uint64      `json:"packets"`                 // tried
	Skipped     uint64      `json:"skipped,omitempty"`       // of unknown link types
	SkippedLink []string    `json:"skipped_links,omitempty"` // the unknown link types
	Cut         uint64      `json:"cut,omitempty"`           // truncated in the capture (snaplen)
	Undecided   uint64      `json:"undecided,omitempty"`     // truncated, with missing bytes relevant to a rule
	Odd         uint64      `json:"odd,omitempty"`           // records longer than their stated packet length
	Empty       uint64      `json:"empty,omitempty"`         // without any bytes
	Interpreted uint64      `json:"interpreted,omitempty"`   // by the interpreter instead of the compiled program
	Engine      string      `json:"engine"`                  // "kernel" or "interpreter"
	Reason      string      `json:"reason,omitempty"`        // for using the interpreter
	Rules       []RuleState `json:"rules"`
	Default     RuleState   `json:"default"`
}

// Trial tries packets on the rules of a filter without attaching it. The kernel runs the compiled
// program on each packet (BPF_PROG_TEST_RUN). The interpreter of the language replaces it if the
// caller may not load programs, or if rates must follow the packets' own timestamps.
type Trial struct {
	filter Filter
	lists  map[string]*list
	result TrialResult
	link   bool // rules use link-layer fields
	// By whether packets have an Ethernet header.
	program map[bool]*kernel.Collection

	exprs []*expr.Expr
	env   expr.Env
	now   uint64 // timestamp of the current packet, ns
	own   []tally

	undecided []uint64 // by rule
}

// NewTrial prepares a trial of f's rules. interpret forces the interpreter.
func NewTrial(f Filter, interpret bool) (*Trial, error) {
	f = f.withDefaults()
	t := &Trial{filter: f, program: map[bool]*kernel.Collection{}, own: make([]tally, len(f.Rules)+1), undecided: make([]uint64, len(f.Rules))}
	t.env.Now = func() uint64 { return t.now }
	t.result.Engine = "kernel"
	for _, r := range f.Rules {
		e, err := expr.Parse(r.Match.Text)
		if err != nil {
			return nil, err
		}
		if err := f.hasLists(e); err != nil {
			return nil, err
		}
		t.exprs = append(t.exprs, e)
		expr.Walk(e.Root, func(n expr.Node) {
			if _, ok := n.(*expr.Rate); ok {
				t.interpret("rates follow the capture's timestamps")
			}
			for _, x := range expr.Operands(n) {
				t.link = t.link || x.Field.Link
			}
		})
	}
	if interpret {
		t.interpret("requested")
	} else if os.Geteuid() != 0 && !users.Has(unix.CAP_BPF) && !users.Has(unix.CAP_SYS_ADMIN) {
		t.interpret("loading programs requires root")
	}
	lists, err := f.readLists()
	if err != nil {
		return nil, err
	}
	t.lists, t.env.Lists = lists, sets(lists)
	return t, nil
}

// hasLists returns an error for a list of the expression unknown to the filter.
func (f Filter) hasLists(e *expr.Expr) error {
	var err error
	expr.Walk(e.Root, func(n expr.Node) {
		if in, ok := n.(*expr.In); ok && in.List != "" && f.Lists[in.List] == "" && err == nil {
			err = &expr.Error{Source: e.Source, Pos: in.Pos(), Msg: fmt.Sprintf("there is no list %q: name its file, with --list %s=FILE or in the configuration's lists", in.List, in.List)}
		}
	})
	return err
}

func (t *Trial) interpret(why string) {
	if t.result.Engine == "kernel" {
		t.result.Engine, t.result.Reason = "interpreter", why
	}
}

func (t *Trial) packet(p expr.Packet, now int64) error {
	t.result.Packets++
	t.now = uint64(now)
	if p.Missing > 0 {
		t.result.Interpreted++
		t.cut(&p)
		return nil
	}
	if t.result.Engine == "kernel" {
		if done, err := t.run(p.Data, p.Layer == expr.Link); done || err != nil {
			return err
		}
	}
	t.result.Interpreted++
	one := tally{1, uint64(len(p.Data)), 0}
	i := t.env.EvalRules(t.exprs, &p, t.filter.unreadable, func(i int) bool {
		t.own[i] = t.own[i].plus(one)
		return t.filter.Rules[i].Action != Count
	})
	if i == len(t.exprs) {
		t.own[i] = t.own[i].plus(one)
	}
	return nil
}

// cut tries a truncated packet. It stops at the first undecidable rule with a deciding action.
func (t *Trial) cut(p *expr.Packet) {
	one := tally{1, uint64(len(p.Data) + p.Missing), 0}
	unsure := false
	i := t.env.EvalCut(t.exprs, p, t.filter.unreadable, func(i int, v expr.Verdict) bool {
		if v == expr.Unsure {
			unsure = true
			t.undecided[i]++
		} else {
			t.own[i] = t.own[i].plus(one)
		}
		return t.filter.Rules[i].Action != Count
	})
	if i == len(t.exprs) {
		t.own[i] = t.own[i].plus(one)
	}
	if unsure {
		t.result.Undecided++
	}
}

// ethernetHeader is the length in bytes of the header required by BPF_PROG_TEST_RUN.
const ethernetHeader = 14

// run runs the program in the kernel. done is false if the kernel does not accept the packet.
func (t *Trial) run(data []byte, ethernet bool) (done bool, err error) {
	if !ethernet && t.link {
		return false, nil // rules on link fields exist only at hooks with a link header
	}
	c := t.program[ethernet]
	if c == nil {
		p := &published{Filter: t.filter, Lists: t.lists}
		p.Filter.Hook = HookTCX
		if !ethernet { // as in nftables: from the IP header on
			p.Filter.Hook = HookNFT
		}
		if c, _, err = p.compileAndLoad(noMaps); err != nil {
			return false, err
		}
		t.program[ethernet] = c
	}
	if !ethernet {
		frame := make([]byte, ethernetHeader, ethernetHeader+len(data))
		frame[12], frame[13] = 0x08, 0x00
		if len(data) > 0 && data[0]>>4 == 6 {
			frame[12], frame[13] = 0x86, 0xdd
		}
		data = append(frame, data...)
	}
	if len(data) < ethernetHeader+1 {
		return false, nil
	}
	_, err = c.Programs[programName].Run(&ebpf.RunOptions{Data: data, Repeat: 1})
	return err == nil, nil // longer than a page: the interpreter accepts any length
}

// skip counts a packet with an unknown link type.
func (t *Trial) skip(link layers.LinkType) {
	t.result.Skipped++
	name := link.String()
	if name == layers.LinkType(math.MaxUint16).String() { // the library's text for unknown types
		name = strconv.Itoa(int(link))
	}
	if !slices.Contains(t.result.SkippedLink, name) && len(t.result.SkippedLink) < 8 {
		t.result.SkippedLink = append(t.result.SkippedLink, name)
	}
}

// note counts truncated, overlong and empty records.
func (t *Trial) note(rec pcap.Record) {
	switch have := len(rec.Data); {
	case have < rec.Wire:
		t.result.Cut++
	case have > rec.Wire:
		t.result.Odd++
	case have == 0:
		t.result.Empty++
	}
}

// Result returns the counts so far.
func (t *Trial) Result() (TrialResult, error) {
	out := t.result
	sums := append([]tally(nil), t.own...)
	for _, c := range t.program {
		for i := range sums {
			s, err := sumCounts(c.Maps[countsMap], i)
			if err != nil {
				return out, err
			}
			sums[i] = sums[i].plus(tally{s.Packets, s.Bytes, 0})
		}
	}
	out.Rules = []RuleState{}
	for i, r := range t.filter.Rules {
		out.Rules = append(out.Rules, RuleState{Name: r.Name, Match: r.Match.Text, Action: r.Action, Packets: sums[i].Packets, Bytes: sums[i].Bytes, Undecided: t.undecided[i]})
	}
	last := sums[len(sums)-1]
	out.Default = RuleState{Action: t.filter.Default, Packets: last.Packets, Bytes: last.Bytes}
	return out, nil
}

// Close releases the programs.
func (t *Trial) Close() {
	for _, c := range t.program {
		c.Close()
	}
}

// Explanation describes a compiled expression.
type Explanation struct {
	Expression   string   `json:"expression"` // in the canonical notation
	Hook         Hook     `json:"hook"`
	Instructions int      `json:"instructions"`
	Maps         []string `json:"maps"`
	// Program is the expression tree, its decision steps, and the commented instructions.
	Program []string `json:"program"`
}

// IsExpressionError reports whether err is about the expression rather than its use.
func IsExpressionError(err error) bool {
	return errors.Is(err, expr.ErrSyntax) || errors.Is(err, compile.ErrRule)
}

// Explain compiles one expression for a hook and returns the program. It loads nothing. lists maps
// the expression's $names to files.
func Explain(text string, h Hook, lists map[string]string) (*Explanation, error) {
	e, err := expr.Parse(text)
	if err != nil {
		return nil, err
	}
	f := Filter{Name: "explain", Hook: h, Lists: lists, Rules: []Rule{{Match: Expression{Text: text}, Action: Drop}}}.withDefaults()
	if err := f.hasLists(e); err != nil {
		return nil, err
	}
	if err := f.Rules[0].check(f); err != nil {
		return nil, err
	}
	read, err := f.readLists()
	if err != nil {
		return nil, err
	}
	c, err := f.compile(h.view(), read)
	if err != nil {
		return nil, err
	}
	out := &Explanation{Expression: e.String(), Hook: h, Instructions: len(c.Spec.Programs[programName].Instructions), Maps: []string{},
		Program: strings.Split(strings.TrimRight(c.Explain(), "\n"), "\n")}
	for _, name := range slices.Sorted(maps.Keys(c.Spec.Maps)) {
		m := c.Spec.Maps[name]
		out.Maps = append(out.Maps, fmt.Sprintf("%s: %s, %d entries", name, m.Type, m.MaxEntries))
	}
	return out, nil
}

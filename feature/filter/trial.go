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
	"github.com/weir-project/weir/kernel"
)

// TrialResult is what rules matched of packets that were tried on them.
type TrialResult struct {
	Packets     uint64      `json:"packets"`                 // that were tried
	Skipped     uint64      `json:"skipped,omitempty"`       // of link types that weir does not know
	SkippedLink []string    `json:"skipped_links,omitempty"` // these
	Cut         uint64      `json:"cut,omitempty"`           // of which the capture has a part (snaplen)
	Undecided   uint64      `json:"undecided,omitempty"`     // of these, whose missing bytes decide about a rule
	Odd         uint64      `json:"odd,omitempty"`           // whose records have more bytes than they say that the packet had
	Empty       uint64      `json:"empty,omitempty"`         // of no bytes at all
	Interpreted uint64      `json:"interpreted,omitempty"`   // by the interpreter, and not by the compiled program
	Engine      string      `json:"engine"`                  // "kernel" or "interpreter"
	Reason      string      `json:"reason,omitempty"`        // the interpreter
	Rules       []RuleState `json:"rules"`
	Default     RuleState   `json:"default"`
}

// Trial tries packets on the rules of a filter without attaching it: with the
// program that would be attached, which the kernel runs on each (BPF_PROG_TEST_RUN);
// or with the interpreter of the language, where one may not load programs or where
// rates are to be those of the packets' own times.
type Trial struct {
	filter Filter
	lists  map[string]*list
	result TrialResult
	link   bool // rules ask for the link layer
	// By whether packets have an Ethernet header.
	program map[bool]*kernel.Collection

	exprs []*expr.Expr
	env   expr.Env
	now   uint64 // ns: the time of the packet
	own   []tally

	undecided []uint64 // by rule
}

// NewTrial prepares to try the rules of f. Interpret asks for the interpreter.
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
				t.interpret("rates are those of the capture's times")
			}
			for _, x := range expr.Operands(n) {
				t.link = t.link || x.Field.Link
			}
		})
	}
	if interpret {
		t.interpret("as asked for")
	} else if os.Geteuid() != 0 {
		t.interpret("only root may load programs")
	}
	lists, err := f.readLists()
	if err != nil {
		return nil, err
	}
	t.lists, t.env.Lists = lists, sets(lists)
	return t, nil
}

// hasLists says which list of an expression is none of the filter's.
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

// cut tries a packet that the capture has a part of. No rule behind one that could decide, and
// cannot be decided, is asked.
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

// ethernetHeader is what the kernel wants before a packet that it is to run a program on.
const ethernetHeader = 14

// run has the kernel run the program; done is false for a packet that it does not take.
func (t *Trial) run(data []byte, ethernet bool) (done bool, err error) {
	if !ethernet && t.link {
		return false, nil // no hook that sees packets without a header takes rules that ask for it
	}
	c := t.program[ethernet]
	if c == nil {
		p := &published{Filter: t.filter, Lists: t.lists}
		p.Filter.Hook = HookTCX
		if !ethernet { // as nftables sees packets: from their IP headers on
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
	return err == nil, nil // longer than a page: the interpreter takes any
}

// skip notes a packet of a link type that is not known.
func (t *Trial) skip(link layers.LinkType) {
	t.result.Skipped++
	name := link.String()
	if name == layers.LinkType(math.MaxUint16).String() { // what all have that the library has no name for
		name = strconv.Itoa(int(link))
	}
	if !slices.Contains(t.result.SkippedLink, name) && len(t.result.SkippedLink) < 8 {
		t.result.SkippedLink = append(t.result.SkippedLink, name)
	}
}

// note counts records of which the capture says that they are not all of a packet, or more than that.
func (t *Trial) note(rec record) {
	switch have := len(rec.data); {
	case have < rec.wire:
		t.result.Cut++
	case have > rec.wire:
		t.result.Odd++
	case have == 0:
		t.result.Empty++
	}
}

// Result adds up what was matched.
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

// Close ends the trial.
func (t *Trial) Close() {
	for _, c := range t.program {
		c.Close()
	}
}

// Explanation is what becomes of an expression.
type Explanation struct {
	Expression   string   `json:"expression"` // as weir reads it
	Hook         Hook     `json:"hook"`
	Instructions int      `json:"instructions"`
	Maps         []string `json:"maps"`
	// Program is the tree, how it is decided, and the instructions with what they are for.
	Program []string `json:"program"`
}

// IsExpressionError says whether an expression is wrong, and not what was done with it.
func IsExpressionError(err error) bool {
	return errors.Is(err, expr.ErrSyntax) || errors.Is(err, compile.ErrRule)
}

// Explain compiles one expression for a hook and shows the program. It loads nothing.
// Lists are the files of what the expression calls $name.
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

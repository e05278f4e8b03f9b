// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
)

// ruleFile is the one rule file: every kind of term, and every action.
var ruleFile = []struct {
	name, match string
	action      filter.Action
}{
	{"other", "not " + ours, filter.Pass},
	{"seen", "ip or ipv6", filter.Count},
	{"middle", "ip.frag_offset > 0 or ipv6.fraghdr.offset > 0", filter.Drop},
	{"magic", `udp.dstport in {53 5060} and payload[-5:] == "xyzzy"`, filter.Drop},
	{"sip", `sip.method == "INVITE" and net.src in {10.0.0.0/15 2001:db8::/64}`, filter.Drop},
	{"web", "tcp.dstport in {80 443} and tcp.flags.syn and not tcp.flags.ack", filter.Pass},
	{"marked", "ip.dsfield.dscp == 46 xor ipv6.tclass.dscp == 46", filter.Count},
	{"tls", "payload[0:3] == 16:03:01 or payload contains \"HTTP/1.\"", filter.Drop},
	{"ping", "(icmp.type == 8 or icmpv6.type == 128) and len(payload) > 100", filter.Drop},
	{"dns", `dns.qname == "example.com"`, filter.Drop},
	{"options", "tcp.options.mss > 1000 and tcp.window & 0x8000", filter.Drop},
	{"headers", "ipv6.dstopts and ipv6.hlim < 64 or ip.hdr_len > 20", filter.Drop},
	{"stranger", "net.src != 10.1.2.3 and net.src != 2001:db8::1 and udp", filter.Drop},
}

// outcome counts the packets counted or decided by each rule.
type outcome map[string]uint64

// judge evaluates a packet with the interpreter.
func (o outcome) judge(exprs []*expr.Expr, p *expr.Packet) (passes bool) {
	i := new(expr.Env).EvalAll(exprs, p, func(i int) bool {
		o[ruleFile[i].name]++
		return ruleFile[i].action != filter.Count
	})
	if i == len(exprs) {
		o[""]++
		return true
	}
	return ruleFile[i].action == filter.Pass
}

// everyHook attaches the rule file at each hook in turn, like weir apply, and compares the passed packets.
func (x *experiment) everyHook(ctx context.Context) error {
	x.say("one rule file of %d rules at each hook, tested with %d real packets", len(ruleFile), x.packets)
	w, err := newWorld(x.env, "hooks", false)
	if err != nil {
		return err
	}
	behind, err := newObserver(w)
	if err != nil {
		return err
	}
	defer behind.close()
	p := product{kernel.OpenRoot(x.env.Root)}
	families := map[string]bool{}
	for _, h := range productHooks {
		rules := make([]filter.Rule, len(ruleFile))
		for i, r := range ruleFile {
			rules[i] = filter.Rule{Name: r.name, Match: filter.Expression{Text: r.match}, Action: r.action}
		}
		if err := p.apply(ctx, filterAt(w, h.hook, rules...)); err != nil {
			return fmt.Errorf("%s: %w", h.hook, err)
		}
		got := func() (outcome, error) { c, err := p.counts(ctx); return c, err }
		ok, err := x.throughHook(ctx, w, string(h.hook), inStack, behind.passed, got)
		if err != nil {
			return fmt.Errorf("%s: %w", h.hook, err)
		}
		before, twice := families[h.family]
		families[h.family] = ok && (before || !twice)
		if err := p.apply(ctx); err != nil {
			return err
		}
	}
	ok, err := x.throughSocket(ctx, w)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	families["socket"] = ok
	n := 0
	for _, ok := range families {
		if ok {
			n++
		}
	}
	x.result.Set("hooks", float64(n))
	return nil
}

// throughHook sends packets, and compares the passed ones and the deciding rules. passed returns the number
// of passed packets so far, got the counters of the rules. It returns true if some packets passed and some
// did not.
func (x *experiment) throughHook(ctx context.Context, w *world, name string, takes func(*packet) bool, passed func() (uint64, error), got func() (outcome, error)) (bool, error) {
	r := rand.New(rand.NewPCG(x.env.Seed, 2)) // equal packets for each
	exprs := make([]*expr.Expr, len(ruleFile))
	for i, r := range ruleFile {
		exprs[i] = expr.MustParse(r.match)
	}
	want := outcome{}
	through, err := passed()
	if err != nil {
		return false, err
	}
	begin, n := through, 0
	for n < x.packets {
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		p := newPacket(r, w.macs, false)
		if !takes(p) {
			continue
		}
		n++
		if want.judge(exprs, p.network()) {
			through++
		}
		if err := w.send(p); err != nil {
			return false, err
		}
		have, err := eventually(through, passed)
		if err != nil {
			return false, err
		}
		if have != through {
			x.mismatches++
			x.result.Note("%s: %d packets passed, want %d: %x", name, have, through, p.frame)
			through = have
		}
	}
	time.Sleep(5 * time.Millisecond) // late packets should have been dropped
	if late, err := passed(); err != nil || late != through {
		x.mismatches++
		x.result.Note("%s: in the end %d packets passed, want %d", name, late, through)
	}
	counted, err := got()
	if err != nil {
		return false, err
	}
	for _, rule := range append([]string{""}, ruleNames()...) {
		if rule != "other" && counted[rule] != want[rule] {
			x.mismatches++
			x.result.Note("%s: rule %q decided %d packets, want %d", name, rule, counted[rule], want[rule])
		}
	}
	x.result.Set("verdicts_compared", x.result.Metrics["verdicts_compared"]+float64(n))
	x.result.Set("passed_"+name, float64(through-begin))
	x.result.Set("dropped_"+name, float64(uint64(n)-(through-begin)))
	return through > begin && through-begin < uint64(n), nil
}

func ruleNames() (out []string) {
	for _, r := range ruleFile {
		out = append(out, r.name)
	}
	return out
}

// eventually polls until the answer is the wanted one, or patience ends, and returns the last answer.
func eventually(want uint64, ask func() (uint64, error)) (uint64, error) {
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Microsecond) {
		last := time.Now().After(deadline)
		got, err := ask()
		if err != nil || got == want || last {
			return got, err
		}
	}
}

// observer counts the packets past all hooks before routing. It is a program of weir too, with the simplest
// rule. The rule file's own counters report its verdicts.
type observer struct {
	counter
	close func()
}

func newObserver(w *world) (*observer, error) {
	prog, c, unload, err := load([]compile.Rule{{Name: "came", Match: expr.MustParse(ours), Action: compile.Count}}, compile.Options{Hook: compile.Netfilter})
	if err != nil {
		return nil, err
	}
	detach, err := attachLinks(w.host, prog, netfilter(kernel.Prerouting, 500)...)
	if err != nil {
		unload()
		return nil, err
	}
	return &observer{c, func() { detach(); unload() }}, nil
}

func (o *observer) passed() (uint64, error) {
	counts, err := o.read()
	if err != nil {
		return 0, err
	}
	return counts[0], nil
}

// throughSocket attaches the rule file to UDP sockets. Passed packets can be read from them.
func (x *experiment) throughSocket(ctx context.Context, w *world) (bool, error) {
	var rules []compile.Rule
	for _, r := range ruleFile {
		rules = append(rules, compile.Rule{Name: r.name, Match: expr.MustParse(r.match), Action: map[filter.Action]compile.Action{
			filter.Pass: compile.Pass, filter.Drop: compile.Drop, filter.Count: compile.Count}[r.action]})
	}
	prog, c, unload, err := load(rules, compile.Options{Hook: compile.Socket, Start: compile.Transport})
	if err != nil {
		return false, err
	}
	defer unload()
	udp, raw, err := openTransport(w)
	defer func() {
		for _, c := range udp {
			c.Close()
		}
		for _, c := range raw {
			c.Close()
		}
	}()
	var fds []int
	for _, c := range udp {
		err = errors.Join(err, onSocket(c, func(fd int) error {
			fds = append(fds, fd)
			return (&hook.SocketFilter{FD: fd, Name: c.LocalAddr().String()}).Attach(prog)
		}))
	}
	if err != nil {
		return false, err
	}
	var through uint64
	passed := func() (uint64, error) {
		b := make([]byte, 4096)
		for _, fd := range fds {
			for {
				_, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
				if errors.Is(err, unix.EAGAIN) {
					break
				} else if err != nil {
					return 0, err
				}
				through++
			}
		}
		return through, nil
	}
	got := func() (outcome, error) {
		counts, err := c.read()
		out := outcome{}
		for i, name := range append(ruleNames(), "") {
			out[name] = counts[i]
		}
		return out, err
	}
	takes := func(p *packet) bool { return p.to == transport && p.last == protoUDP }
	return x.throughHook(ctx, w, "socket", takes, passed, got)
}

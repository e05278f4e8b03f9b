// SPDX-License-Identifier: Apache-2.0

package compile_test

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/weir-project/weir/kernel/kerneltest"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/compile/running"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/feature/filter/filtertest"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// Fields invisible to a hook are an error with the field's position.
func TestHookErrors(t *testing.T) {
	for _, c := range []struct {
		hook   compile.Hook
		expr   string
		column int
		want   error
		msg    string
	}{
		{compile.Netfilter, "udp and eth.src == 02:00:00:00:00:01", 9, compile.ErrRule, "eth.src needs the link layer, invisible to this hook"},
		{compile.XTBPF, "vlan.id == 7", 1, compile.ErrRule, "use tcx, clsact or xdp"},
		{compile.Socket, "not (udp or eth)", 13, compile.ErrRule, "invisible to this hook"},
		{compile.TC, "tcp and ip.src in $bogons", 9, compile.ErrList, `no list "bogons"`},
	} {
		_, err := compile.Compile([]compile.Rule{rule(compile.Drop, "%s", c.expr)}, compile.Options{Hook: c.hook, Kernel: &running.Kernel{}})
		e, ok := errors.AsType[*expr.Error](err)
		if !ok || !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.msg) {
			t.Errorf("%s at %s: %v, want %q", c.expr, c.hook, err, c.msg)
			continue
		}
		if _, column, _ := e.Position(); column != c.column {
			t.Errorf("%s at %s: column %d, want %d", c.expr, c.hook, column, c.column)
		}
	}
	for what, o := range map[string]compile.Options{
		"a default that counts": {Default: compile.Count}, "a hook of no number": {Hook: 9},
		"an XDP program for sockets": {Hook: compile.XDP, Start: compile.Transport}, "Ethernet at netfilter": {Hook: compile.Netfilter, Start: compile.Ethernet},
	} {
		o.Kernel = &running.Kernel{}
		if _, err := compile.Compile(nil, o); err == nil {
			t.Errorf("%s is accepted", what)
		}
	}
}

// run runs a program on a packet and returns the verdict.
func run(t *testing.T, p *ebpf.Program, data []byte) uint32 {
	t.Helper()
	got, err := p.Run(&ebpf.RunOptions{Data: data})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// The first rule with pass or drop decides, and count rules before it count. Verdicts are the hook's return codes.
func TestVerdicts(t *testing.T) {
	rules := []compile.Rule{
		rule(compile.Count, "udp"), rule(compile.Pass, "udp.dstport == 53"), rule(compile.Count, "ip"),
		rule(compile.Drop, `payload contains "attack"`), rule(compile.Drop, "udp.dstport == 53"),
	}
	for hook, verdict := range map[compile.Hook][2]uint32{
		compile.XTBPF: {0, 1}, compile.Netfilter: {1, 0}, compile.TC: {0xffffffff, 2}, compile.XDP: {2, 1}, compile.Socket: {0x7fffffff, 0},
	} {
		t.Run(hook.String(), func(t *testing.T) {
			needHook(t, hook)
			c := load(t, rules, filtertest.Options(hook))
			cut := 0
			if hook == compile.Netfilter {
				cut = 14
			}
			p := c.Programs[compile.ProgramName]
			for _, x := range []struct {
				port    uint16
				payload string
				want    uint32
			}{{53, "an attack", verdict[0]}, {54, "an attack on it", verdict[1]}, {54, "peace of all kinds", verdict[0]}} {
				if got := run(t, p, datagram([4]byte{10, 0, 0, 1}, x.port, x.payload)[cut:]); got != x.want {
					t.Errorf("port %d, %s: verdict %d, want %d", x.port, x.payload, int32(got), int32(x.want))
				}
			}
			counts, err := filtertest.ReadCounts(c.Maps[compile.CountsName], len(rules)+1)
			if err != nil {
				t.Fatal(err)
			}
			for i, want := range []uint64{3, 1, 2, 1, 0, 1} {
				if counts[i].Packets != want {
					t.Errorf("rule %d: %d packets, want %d", i+1, counts[i].Packets, want)
				}
				if (counts[i].Last > 0) != (want > 0) || (counts[i].Bytes > 0) != (want > 0) {
					t.Errorf("rule %d: %+v", i+1, counts[i])
				}
			}
		})
	}
}

// Many rules tested in turn fit one program, up to an error with a remedy.
func TestMany(t *testing.T) {
	nstest.NeedRoot(t)
	for _, n := range []int{100, 3900} {
		var rules []compile.Rule
		for i := range n {
			rules = append(rules, rule(compile.Drop, "udp.dstport > %d and ip.ttl == %d and udp.srcport < %d", 10000+i, i%250, 60000-i))
		}
		c := load(t, rules, compile.Options{Hook: compile.XTBPF})
		if got := run(t, c.Programs[compile.ProgramName], datagram([4]byte{10, 0, 0, 1}, 9999, "0123456789ab")); got != 0 {
			t.Errorf("%d rules: verdict %d", n, got)
		}
		// TTL 64 and source port 1234 match the first rule about TTL 64.
		if got := run(t, c.Programs[compile.ProgramName], datagram([4]byte{10, 0, 0, 1}, 65000, "0123456789ab")); got != 1 {
			t.Errorf("%d rules: verdict %d, want a drop", n, got)
		}
	}
	var rules []compile.Rule
	for i := range 40_000 {
		rules = append(rules, rule(compile.Drop, "udp.dstport > %d and ip.ttl == %d", i, i%250))
	}
	if _, err := compile.Compile(rules, compile.Options{Hook: compile.XTBPF}); !errors.Is(err, compile.ErrTooLarge) {
		t.Errorf("40,000 rules: got %v, want ErrTooLarge", err)
	}
}

// The maximum number of patterns fits one program, and the right one decides.
func TestManyPatterns(t *testing.T) {
	for _, h := range []compile.Hook{compile.XTBPF, compile.Netfilter, compile.TC, compile.XDP} {
		t.Run(h.String(), func(t *testing.T) {
			needHook(t, h)
			k, err := compile.Running(h)
			if err != nil {
				t.Fatal(err)
			}
			n := 100
			if !k.MayGoto {
				n = 8
			}
			var rules []compile.Rule
			for i := range n {
				rules = append(rules, rule(compile.Drop, `udp.dstport == %d and payload contains "attack %d."`, 5000+i, i))
			}
			c := load(t, rules, compile.Options{Hook: h})
			for _, i := range []int{0, 1, n / 2, n - 1} {
				for _, other := range []int{0, 1} {
					payload := strings.Repeat("-", 70) + fmt.Sprintf("attack %d.", i+other)
					data := datagram([4]byte{10, 0, 0, 1}, uint16(5000+i), payload)
					if h == compile.Netfilter {
						data = data[14:]
					}
					want := [2]compile.Action{compile.Drop, compile.Pass}[other]
					if got := run(t, c.Programs[compile.ProgramName], data); got != h.Verdict(want) {
						t.Errorf("port %d, %q: verdict %d", 5000+i, payload, int32(got))
					}
				}
			}
		})
	}
	var rules []compile.Rule
	for i := range 257 {
		rules = append(rules, rule(compile.Drop, `payload contains "attack %d."`, i))
	}
	if _, err := compile.Compile(rules, compile.Options{Hook: compile.XTBPF}); !errors.Is(err, compile.ErrTooLarge) {
		t.Errorf("257 patterns: got %v, want ErrTooLarge", err)
	}
}

// The probes find the features of the kernel's version.
func TestRunning(t *testing.T) {
	nstest.NeedRoot(t)
	v, err := kerneltest.Release()
	if err != nil {
		t.Fatal(err)
	}
	k, err := compile.Running(compile.TC)
	if err != nil {
		t.Fatal(err)
	}
	since := func(minor int) bool { return v[0] > 5 || v[0] == 5 && v[1] >= minor }
	if k.CoarseClock != since(11) || k.Atomics != since(12) {
		t.Errorf("Linux %d.%d: %+v", v[0], v[1], k)
	}
}

// Explain names every rule, and annotates instructions with their rule.
func TestExplain(t *testing.T) {
	rules := []compile.Rule{{Name: "dns", Match: expr.MustParse("udp.dstport == 53 and not ip.src == 10.0.0.0/8"), Action: compile.Pass}}
	for i := range 20 {
		rules = append(rules, rule(compile.Drop, "tcp.dstport == %d", i))
	}
	p, err := compile.Compile(rules, compile.Options{Hook: compile.TC, Kernel: &running.Kernel{}})
	if err != nil {
		t.Fatal(err)
	}
	text := p.Explain()
	for _, want := range []string{
		"rule 1 dns: pass if udp.dstport == 53 and not ip.src == 10.0.0.0/8\n  and\n    udp.dstport == 53\n    not\n      ip.src == 10.0.0.0/8\n  tested in turn\n",
		"found with 20 rules by one lookup of tcp.dstport in map filter_g0", "else: pass", "; rule 1 dns: udp.dstport == 53", "; ip.src == 10.0.0.0/8",
		fmt.Sprintf("%d instructions", len(p.Spec.Programs[compile.ProgramName].Instructions)),
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
}

// TCP options may have any order. Storing one must not change another.
func TestOptions(t *testing.T) {
	frame, err := hex.DecodeString("020000000002020000000001" + "0800" + "4500003c00000000400600000a0102030a010204" +
		"c00000500000000100000000a002faf000000000" + "030307" + "020405b4" + "0402" + "080a0000006400000065" + "00")
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range []compile.Hook{compile.XTBPF, compile.Netfilter, compile.TC, compile.XDP} {
		t.Run(h.String(), func(t *testing.T) {
			needHook(t, h)
			c := load(t, []compile.Rule{rule(compile.Drop, "tcp.options.wscale.shift == 7 and tcp.options.mss_val == 1460 and tcp.options.sack_perm and "+
				"tcp.options.timestamp.tsval == 100 and tcp.options.timestamp.tsecr == 101")}, compile.Options{Hook: h})
			data := frame
			if h == compile.Netfilter {
				data = frame[14:]
			}
			if got := run(t, c.Programs[compile.ProgramName], data); got != h.Verdict(compile.Drop) {
				t.Errorf("verdict %d", int32(got))
			}
		})
	}
}

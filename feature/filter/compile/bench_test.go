// SPDX-License-Identifier: Apache-2.0

package compile_test

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/compile/running"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// datagram returns an Ethernet frame with a UDP datagram over IPv4.
func datagram(src [4]byte, port uint16, payload string) []byte {
	b := append([]byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0}, make([]byte, 26)...)
	binary.BigEndian.PutUint16(b[16:], uint16(28+len(payload)))
	b[22], b[23] = 64, 17
	copy(b[26:], src[:])
	copy(b[30:], []byte{10, 9, 9, 9})
	binary.BigEndian.PutUint16(b[34:], 1234)
	binary.BigEndian.PutUint16(b[36:], port)
	binary.BigEndian.PutUint16(b[38:], uint16(8+len(payload)))
	return append(b, payload...)
}

func rule(action compile.Action, format string, args ...any) compile.Rule {
	return compile.Rule{Match: expr.MustParse(fmt.Sprintf(format, args...)), Action: action}
}

// tenRules returns ten rules of five terms.
func tenRules() []compile.Rule {
	var rules []compile.Rule
	for i := range 10 {
		rules = append(rules, rule(compile.Drop, `ip.src == 10.%d.0.0/16 and udp.dstport in {53 %d..%d} and ip.ttl > %d and not udp.srcport == %d and payload[0:2] == "%02d"`, i, 5000+i, 6000+i, i, 1000+i, i))
	}
	return rules
}

func load(tb testing.TB, rules []compile.Rule, o compile.Options) *kernel.Collection {
	tb.Helper()
	p, err := compile.Compile(rules, o)
	if err != nil {
		tb.Fatal(err)
	}
	c, err := kernel.Load(p.Spec, []string{compile.ProgramName}, nil)
	if err != nil {
		tb.Fatalf("%+v", err)
	}
	tb.Cleanup(c.Close)
	return c
}

func needHook(tb testing.TB, h compile.Hook) {
	tb.Helper()
	nstest.NeedRoot(tb)
	if h == compile.Netfilter {
		if err := running.DynptrSkb.Check(); err != nil {
			tb.Skip("need: kernel", err)
		}
	}
}

// BenchmarkCompileLoad measures ten rules of five terms, from text to the loaded program.
func BenchmarkCompileLoad(b *testing.B) {
	for _, h := range []compile.Hook{compile.XTBPF, compile.Netfilter, compile.TC, compile.XDP} {
		b.Run(h.String(), func(b *testing.B) {
			needHook(b, h)
			var times []time.Duration
			for b.Loop() {
				start := time.Now()
				p, err := compile.Compile(tenRules(), compile.Options{Hook: h})
				if err != nil {
					b.Fatal(err)
				}
				c, err := kernel.Load(p.Spec, []string{compile.ProgramName}, nil)
				if err != nil {
					b.Fatal(err)
				}
				times = append(times, time.Since(start))
				c.Close()
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Nanoseconds())/1e6, "ms-p50")
		})
	}
}

// BenchmarkPacket measures the cost of a packet for several rule sets.
func BenchmarkPacket(b *testing.B) {
	many := make([]compile.Rule, 10_000)
	for i := range many {
		many[i] = rule(compile.Drop, "ip.src == 10.1.2.3 and udp.dstport == %d", 4000+i)
	}
	hundred := make([]compile.Rule, 100)
	for i := range hundred {
		hundred[i] = rule(compile.Drop, "ip.src == 10.1.2.3 and udp.dstport > %d and ip.ttl == %d", 60000+i, i)
	}
	for name, rules := range map[string][]compile.Rule{
		"0-none": nil, "1-port": {rule(compile.Drop, "udp.dstport == 9999")},
		"2-100-in-turn": hundred, "3-10000-equal": many,
		"4-contains": {rule(compile.Drop, `payload contains "xyzzy"`)},
		"5-rate":     {rule(compile.Drop, `rate(ip.src) > 10000000/s`)},
	} {
		for _, h := range []compile.Hook{compile.XTBPF, compile.Netfilter, compile.TC, compile.XDP} {
			b.Run(name+"/"+h.String(), func(b *testing.B) {
				needHook(b, h)
				p := load(b, rules, compile.Options{Hook: h}).Programs[compile.ProgramName]
				data := datagram([4]byte{10, 1, 2, 3}, 3999, "a payload of some thirty bytes.")
				if h == compile.Netfilter {
					data = data[14:]
				}
				var best time.Duration
				for range 5 {
					_, d, err := benchmark(p, data)
					if err != nil {
						b.Fatal(err)
					}
					if best == 0 || d < best {
						best = d
					}
				}
				for b.Loop() {
				}
				b.ReportMetric(float64(best.Nanoseconds()), "ns/packet")
			})
		}
	}
}

// BenchmarkList compares a list of 100,000 prefixes in a table with a rule without a list.
func BenchmarkList(b *testing.B) {
	for _, text := range []string{"udp.dstport == 9 and ip.dst == 1.2.3.4", "udp.dstport == 3999 and ip.src in $many"} {
		b.Run(strings.Fields(text)[len(strings.Fields(text))-1], func(b *testing.B) {
			needHook(b, compile.XDP)
			o := compile.Options{Hook: compile.XDP, Lists: map[string]compile.List{"many": {Segments: 4}}}
			p, err := compile.Compile([]compile.Rule{rule(compile.Drop, "%s", text)}, o)
			if err != nil {
				b.Fatal(err)
			}
			start := time.Now()
			c, err := kernel.Load(p.Spec, []string{compile.ProgramName}, nil)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			b.ReportMetric(float64(time.Since(start).Microseconds())/1e3, "ms-load")
			if name := p.Tables["many"]; name != "" {
				m, err := table.Find(c.Maps, name)
				if err != nil {
					b.Fatal(err)
				}
				t, err := table.Open(m)
				if err != nil {
					b.Fatal(err)
				}
				entries := make([]table.Entry, 100_000)
				for i := range entries {
					entries[i] = table.Entry{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(20 + i>>16), byte(i >> 8), byte(i), 0}), 24), Value: 1}
				}
				if err := t.Replace(entries); err != nil {
					b.Fatal(err)
				}
				if err := t.Close(); err != nil {
					b.Fatal(err)
				}
			}
			for b.Loop() {
			}
			_, d, err := benchmark(c.Programs[compile.ProgramName], datagram([4]byte{20, 1, 2, 3}, 3999, "a payload of some thirty bytes."))
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(d.Nanoseconds()), "ns/packet")
		})
	}
}

func benchmark(p *ebpf.Program, data []byte) (uint32, time.Duration, error) {
	return p.Benchmark(data, 100_000, nil)
}

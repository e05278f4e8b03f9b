// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/filter/expr"
)

// A decided answer about a truncated packet equals the answer about the whole packet. Expressions,
// packets and lengths are random, and rules use each treatment of unreadable fields.
func TestCut(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	r := rand.New(rand.NewPCG(seed, 4))
	whole, cut := expr.Env{Lists: map[string]expr.Set{ListName: prefixes(List)}}, expr.Env{Lists: map[string]expr.Set{ListName: prefixes(List)}}
	decided, all := 0, 0
	for range max(rounds(20000), 1000) { // few expressions may all be decided by chance
		es := []*expr.Expr{Expr(r, Kinds{Link: true, Lists: true, Costs: true})}
		b := Packet(r)
		if len(b) == 0 {
			continue
		}
		n := r.IntN(len(b))
		u := pick(r, []expr.Unreadable{expr.TreatAbsent, expr.TreatMatch, expr.TreatNoMatch})
		p, part := &expr.Packet{Data: b}, &expr.Packet{Data: b[:n], Missing: len(b) - n}
		if one(r, 4) && len(b) > 14 && n > 14 {
			p, part = &expr.Packet{Data: b[14:], Layer: expr.Network}, &expr.Packet{Data: b[14:n], Missing: len(b) - n, Layer: expr.Network}
		}
		take := func(int) expr.Unreadable { return u }
		want := whole.EvalRules(es, p, take, func(int) bool { return true }) == 0
		got := expr.No
		cut.EvalCut(es, part, take, func(_ int, v expr.Verdict) bool {
			got = v
			return true
		})
		all++
		if got != expr.Unsure {
			decided++
			if want != (got == expr.Yes) {
				t.Errorf("seed %d: %s is %t for the whole packet, but not for its first %d bytes (unreadable %d): %x", seed, es[0], want, n, u, b)
			}
		}
	}
	if decided < all/3 || decided == all {
		t.Errorf("seed %d: only %d of %d expressions are decided", seed, decided, all)
	}
}

// The captured bytes of each field, and the original lengths, decide.
func TestCutFields(t *testing.T) {
	frame := append(make([]byte, 12, 200), 8, 0)
	frame = append(frame, v4(0, 0, 6, append(synTo(443), make([]byte, 76)...))...) // 100 bytes of TCP, with a header of 24
	for _, c := range []struct {
		n    int
		text string
		want expr.Verdict
	}{
		{54, "tcp.dstport == 443", expr.Yes}, {38, "tcp.dstport == 443", expr.Yes}, {37, "tcp.dstport == 443", expr.Unsure}, {37, "tcp.dstport != 443", expr.Unsure},
		{34, "tcp", expr.Unsure}, {34, "udp", expr.No}, {34, "not udp", expr.Yes}, {33, "udp", expr.No}, {23, "udp", expr.Unsure}, {38, "tcp", expr.Yes},
		{34, "ip.dst == 10.1.2.4", expr.Yes}, {33, "ip.dst == 10.1.2.4", expr.Unsure}, {33, "ip.src == 10.1.2.3", expr.Yes}, {33, "ip.addr == 10.1.2.3", expr.Yes}, {33, "ip.addr != 10.1.2.3", expr.No},
		{15, "ip", expr.Yes}, {14, "ip", expr.Unsure}, {14, "ip6", expr.No}, {14, "eth.type == 0x800", expr.Yes}, {13, "eth.type == 0x800", expr.Unsure}, {13, "eth.src == 00:00:00:00:00:00", expr.Unsure},
		{58, "tcp.len == 76", expr.Yes}, {54, "tcp.len == 76", expr.Yes}, {58, "len(payload) > 76", expr.No}, {46, "tcp.len == 76", expr.Unsure}, {47, "tcp.len == 76", expr.Yes},
		{34, "ip.len == 120", expr.Yes}, {58, "tcp.options.mss_val == 1460", expr.Yes}, {57, "tcp.options.mss_val == 1460", expr.Unsure}, {57, "tcp.options.sack_perm", expr.Unsure},
		{60, "payload[1] == 0", expr.Yes}, {60, "payload[2] == 0", expr.Unsure}, {60, "payload[76] == 0", expr.No}, {60, "payload[-1] == 0", expr.Unsure}, {60, "payload[0:2] == 00:00", expr.Yes},
		{60, `payload contains "x"`, expr.Unsure}, {60, `payload contains 00:00`, expr.Yes}, {60, `payload matches "$"`, expr.Unsure}, {60, `payload matches "\\x00"`, expr.Yes}, {60, "payload", expr.Yes},
		{60, `sip.method == "ACK"`, expr.No}, {58, `sip.method == "ACK"`, expr.Unsure}, {58, "dns.qtype == 1", expr.No},
		{38, "tcp.flags.syn and tcp.dstport == 80", expr.No}, {38, "tcp.flags.syn or tcp.dstport == 443", expr.Yes}, {38, "tcp.flags.syn xor tcp.dstport == 443", expr.Unsure},
		{38, "rate(tcp.dstport) > 100/s", expr.No}, {36, "rate(tcp.dstport) > 100/s", expr.Unsure}, {47, "transport.unreadable", expr.No}, {38, "transport.unreadable", expr.Unsure},
	} {
		got := expr.No
		new(expr.Env).EvalCut([]*expr.Expr{expr.MustParse(c.text)}, &expr.Packet{Data: frame[:c.n], Missing: len(frame) - c.n},
			func(int) expr.Unreadable { return expr.TreatAbsent }, func(_ int, v expr.Verdict) bool { got = v; return true })
		if got != c.want {
			t.Errorf("%s for the first %d bytes: got %d, want %d", c.text, c.n, got, c.want)
		}
	}
}

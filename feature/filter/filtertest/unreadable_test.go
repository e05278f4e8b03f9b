// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// synTo returns a SYN to a port, 24 bytes.
func synTo(port uint16) []byte {
	b := make([]byte, 24)
	be.PutUint16(b, 40000)
	be.PutUint16(b[2:], port)
	b[12], b[13] = 6<<4, 2
	copy(b[20:], "\x02\x04\x05\xb4")
	return b
}

// v4 returns an IPv4 packet with the given length of options, fragment field and body, padded to
// Ethernet's minimum.
func v4(options int, frag uint16, proto byte, body []byte) []byte {
	b := make([]byte, 20+options)
	b[0] = 0x40 | byte(5+options/4)
	be.PutUint16(b[2:], uint16(len(b)+len(body)))
	be.PutUint16(b[6:], frag)
	b[8], b[9] = 64, proto
	copy(b[12:], "\x0a\x01\x02\x03\x0a\x01\x02\x04")
	b = append(b, body...)
	return append(b, make([]byte, max(0, 46-len(b)))...)
}

// v6 returns an IPv6 packet with extension headers of these kinds, 8 bytes each.
func v6(kinds []byte, proto byte, body []byte) []byte {
	next := proto
	for i := len(kinds) - 1; i >= 0; i-- {
		h := make([]byte, 8)
		h[0] = next
		if kinds[i] == 44 {
			h[3] = 1 // more fragments
		}
		next, body = kinds[i], append(h, body...)
	}
	b := make([]byte, 40)
	b[0], b[6], b[7] = 0x60, next, 64
	be.PutUint16(b[4:], uint16(len(body)))
	copy(b[8:], addrs6[0])
	copy(b[24:], addrs6[1])
	return append(b, body...)
}

func repeat(kind byte, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = kind
	}
	return out
}

// For a partial transport header, every hook drops by the present bytes, and otherwise if any value
// could match.
func TestUnreadable(t *testing.T) {
	syn := synTo(23)
	long := synTo(80)
	long[12] = 15 << 4
	type rule struct {
		text string
		drop bool // else it passes, and the default drops
	}
	behindAH := func(frag uint16, n int) []byte {
		return v4(0, frag, 51, append([]byte{6, 4, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 23: 0}, syn[:n]...))
	}
	withOptions := func(options string) []byte {
		b := append(synTo(80)[:20], options...)
		b[12] = byte(len(b)/4) << 4
		return v4(0, 0, 6, b)
	}
	port, flags, pass, option := rule{"tcp.dstport == 23", true}, rule{"tcp.flags.syn and not tcp.flags.ack", true}, rule{"tcp.dstport != 23", false}, rule{"tcp.options.mss_val < 536", true}
	for name, c := range map[string]struct {
		packet []byte
		rule   rule
		drops  bool
	}{
		"whole":                            {v4(0, 0, 6, syn), port, true},
		"8 bytes to the port":              {v4(0, 0x2000, 6, syn[:8]), port, true},
		"16 bytes to the port":             {v4(0, 0x2000, 6, syn[:16]), port, true},
		"8 bytes behind IPv4 options":      {v4(40, 0x2000, 6, syn[:8]), port, true},
		"8 bytes to another port":          {v4(0, 0x2000, 6, synTo(80)[:8]), port, false},
		"8 bytes, flags":                   {v4(0, 0x2000, 6, synTo(80)[:8]), flags, true},
		"16 bytes, flags":                  {v4(0, 0x2000, 6, synTo(80)[:16]), flags, true},
		"8 bytes, a rule that passes":      {v4(0, 0x2000, 6, syn[:8]), pass, true},
		"8 bytes, flags, passes":           {v4(0, 0x2000, 6, syn[:8]), rule{"not tcp.flags.syn", false}, true},
		"4 bytes":                          {v4(0, 0x2000, 6, synTo(80)[:4]), port, true},
		"a later fragment":                 {v4(0, 0x2001, 6, syn[8:]), port, false},
		"UDP of 4 bytes":                   {v4(0, 0, 17, syn[:4]), rule{"udp.dstport == 53", true}, true},
		"options that are not there":       {v4(0, 0x2000, 6, long), option, true},
		"options, a rule about ports":      {v4(0, 0x2000, 6, long), port, false},
		"another protocol":                 {v4(0, 0, 50, syn[:4]), port, false},
		"no such address":                  {v4(0, 0, 6, syn[:4]), rule{"ip.src == 192.0.2.1 and tcp.dstport == 23", true}, false},
		"the field":                        {v4(0, 0x2000, 6, syn[:8]), rule{"transport.unreadable", true}, true},
		"the field, whole":                 {v4(0, 0, 6, syn), rule{"transport.unreadable", true}, false},
		"9 extension headers":              {v6(repeat(60, 9), 6, syn), port, true},
		"20 extension headers":             {v6(repeat(60, 20), 6, syn), port, true},
		"32 extension headers":             {v6(repeat(43, 32), 6, syn), port, true},
		"32 to another port":               {v6(repeat(60, 32), 6, synTo(80)), port, false},
		"33 extension headers":             {v6(repeat(60, 33), 6, synTo(80)), port, true},
		"33 extension headers, UDP rule":   {v6(repeat(60, 33), 6, syn), rule{"udp.dstport == 53", true}, true},
		"33 extension headers, fragment":   {v6(repeat(60, 33), 6, syn), rule{"ipv6.fraghdr", true}, true},
		"AH, options and routing":          {v6([]byte{0, 60, 43, 60}, 6, syn), port, true},
		"fragment of 8 bytes, IPv6":        {v6([]byte{60, 44}, 6, syn[:8]), port, true},
		"fragment of nothing, IPv6":        {v6([]byte{44}, 6, nil), port, true},
		"a header that goes on behind":     {append(v6([]byte{60}, 6, nil)[:41], 200, 0, 0, 0, 0, 0, 0), port, true},
		"IPv4, AH":                         {behindAH(0, 24), port, true},
		"IPv4, AH, 8 bytes":                {behindAH(0x2000, 8), port, true},
		"IPv4, AH, to another port":        {v4(0, 0, 51, append([]byte{6, 1, 11: 0}, synTo(80)...)), port, false},
		"IPv4, half an AH":                 {v4(0, 0x2000, 51, []byte{6, 4, 0, 0}), port, true},
		"IPv4, AH twice":                   {v4(0, 0, 51, append([]byte{51, 1, 11: 0}, synTo(80)...)), port, true},
		"36 options before the MSS":        {withOptions(string(repeat(1, 36)) + "\x02\x04\x01\x90"), option, true},
		"the last MSS counts":              {withOptions("\x02\x04\x05\xb4\x02\x04\x01\x90"), option, true},
		"the first MSS does not count":     {withOptions("\x02\x04\x01\x90\x02\x04\x05\xb4"), option, false},
		"no next header":                   {v6([]byte{60}, 59, nil), port, false},
		"33 extension headers, in a group": {v6(repeat(60, 33), 6, syn), rule{"tcp.dstport == 23 and ipv6.src == 2001:db8::1", true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := compile.Rule{Match: expr.MustParse(c.rule.text), Action: compile.Pass}
			o := compile.Options{Default: compile.Drop}
			if c.rule.drop {
				r.Action, o.Default = compile.Drop, compile.Pass
			}
			for h := compile.Socket; h <= compile.XDP; h++ {
				needHook(t, h)
				ho := Options(h)
				ho.Default = o.Default
				if got := verdict(t, ho, c.packet, r); got != c.drops {
					t.Errorf("%s: drops is %t, want %t", h, got, c.drops)
				}
				if got := verdict(t, ho, c.packet, among(r)...); got != c.drops {
					t.Errorf("%s: with other rules, drops is %t, want %t", h, got, c.drops)
				}
				ho.AbsentUnreadable = true
				p, err := compile.Compile([]compile.Rule{r}, ho)
				if err != nil {
					t.Fatal(err)
				}
				load(t, p)
			}
		})
	}
}

// among places a rule between others without a match. A few rules share one version for all
// packets; a single rule has a copy for unreadable ones.
func among(r compile.Rule) []compile.Rule {
	other := compile.Rule{Match: expr.MustParse("ip.ttl == 3 and udp.dstport in {9 11 13 15 17}"), Action: compile.Drop}
	passes := compile.Rule{Match: expr.MustParse("ipv6.hlim == 3 and not tcp.port == 9"), Action: compile.Pass}
	return []compile.Rule{other, passes, r, passes, other}
}

// The kernel removes any number of tags of VLAN 0. After more tags than are walked, every drop rule
// matches.
func TestManyTags(t *testing.T) {
	nstest.NeedRoot(t)
	for _, c := range []struct {
		tags  int
		port  uint16
		rule  string
		drops bool
	}{
		{3, 23, "tcp.dstport == 23", true}, {3, 80, "tcp.dstport == 23", false}, {2 + expr.MaxTags, 23, "tcp.dstport == 23", true},
		{2 + expr.MaxTags, 80, "tcp.dstport == 23", false}, {3 + expr.MaxTags, 80, "tcp.dstport == 23", true},
		{3 + expr.MaxTags, 80, "ip.src == 192.0.2.1", true}, {3 + expr.MaxTags, 80, "vlan.id == 7", false},
		{3 + expr.MaxTags, 80, "vlan.id == 7 and tcp.dstport == 23", false}, {3 + expr.MaxTags, 80, "ipv6", true},
	} {
		ip := v4(0, 0, 6, synTo(c.port))
		frame := make([]byte, 12)
		for range c.tags {
			frame = append(frame, 0x81, 0, 0, 0)
		}
		frame = append(append(frame, 8, 0), ip...)
		r := compile.Rule{Match: expr.MustParse(c.rule), Action: compile.Drop}
		for _, h := range []compile.Hook{compile.TC, compile.XDP} {
			for _, rules := range [][]compile.Rule{{r}, {r, r, r, r}} {
				if got := run(t, Options(h), frame, rules...); got != c.drops {
					t.Errorf("%s, %d tags, port %d: %s drops: %t", h, c.tags, c.port, c.rule, got)
				}
			}
		}
	}
}

func load(t *testing.T, p *compile.Program) *kernel.Collection {
	t.Helper()
	c, err := kernel.Load(p.Spec, []string{compile.ProgramName}, nil)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// verdict runs rules on an IP packet and reports whether it is dropped.
func verdict(t *testing.T, o compile.Options, packet []byte, rules ...compile.Rule) bool {
	t.Helper()
	if o.Hook != compile.Netfilter {
		kind := byte(0x08)
		low := byte(0)
		if packet[0]>>4 == 6 {
			kind, low = 0x86, 0xdd
		}
		packet = append(append(make([]byte, 12), kind, low), packet...)
	}
	return run(t, o, packet, rules...)
}

func run(t *testing.T, o compile.Options, data []byte, rules ...compile.Rule) bool {
	t.Helper()
	p, err := compile.Compile(rules, o)
	if err != nil {
		t.Fatal(err)
	}
	got, err := load(t, p).Programs[compile.ProgramName].Run(&ebpf.RunOptions{Data: data})
	if err != nil {
		t.Fatal(err)
	}
	return got == o.Hook.Verdict(compile.Drop)
}

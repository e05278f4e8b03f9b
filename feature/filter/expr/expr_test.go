// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"
)

// good maps expressions to their canonical form, "" if they are canonical.
var good = []struct{ in, out string }{
	{"udp.dstport == 53", ""},
	{"udp.dstport==53", "udp.dstport == 53"},
	{"udp.dstport eq 0x35", "udp.dstport == 53"},
	{"tcp.port ne 80 && !udp || ip", "tcp.port != 80 and not udp or ip"},
	{"ip or udp xor tcp and icmp", ""},
	{"(ip or udp) and (tcp xor icmp)", ""},
	{"ip and (udp and tcp)", ""},
	{"not (ip and udp)", ""},
	{"not not ip", ""},
	{"(((ip)))", "ip"},
	{"ip ^^ udp", "ip xor udp"},
	{"ip6.src == 2001:DB8:0::1", "ipv6.src == 2001:db8::1"},
	{"ip.src in {10.0.0.0/8, 192.0.2.1..192.0.2.9 1.2.3.4}", "ip.src in {10.0.0.0/8 192.0.2.1..192.0.2.9 1.2.3.4}"},
	{"ip.src not in {10.0.0.0/8}", "not ip.src in {10.0.0.0/8}"},
	{"net.src in $bogons-2", ""},
	{"udp.port in {53 5000..6000}", ""},
	{"tcp.flags & 0x12", ""},
	{"(tcp.flags & 0x3f) == 2", "(tcp.flags & 0x3f) == 0x2"},
	{"tcp.flags & 0x3f == 0x2", "(tcp.flags & 0x3f) == 0x2"},
	{"(tcp.flags & 0x3f) in {2 0x12}", "(tcp.flags & 0x3f) in {0x2 0x12}"},
	{"(udp.port) == 1", "udp.port == 1"},
	{"tcp.flags.syn and not tcp.flags.ack", ""},
	{"tcp.flags.syn == true", "tcp.flags.syn == 1"},
	{"tcp.flags.syn == True or tcp.flags.ack == FALSE", "tcp.flags.syn == 1 or tcp.flags.ack == 0"},
	{"eth.src == 02-00-00-00-00-0A", "eth.src == 02:00:00:00:00:0a"},
	{"vlan.id == 7", ""},
	{`payload[-5:] == "xyzzy"`, ""},
	{`payload[0:2] == 16:03`, `payload[0:2] == "\x16\x03"`},
	{`payload[3] == 0x16`, ""},
	{`payload[-1] & 0x80`, ""},
	{`payload[:4] == "abcd"`, `payload[0:4] == "abcd"`},
	{`payload[0:] contains "a\"b"`, `payload contains "a\"b"`},
	{`payload[4:] ~ "^a[bc]+d$"`, `payload[4:] matches "^a[bc]+d$"`},
	{`payload[0-3] == "abcd"`, `payload[0:4] == "abcd"`},
	{`payload matches r"\d+\.x"`, `payload matches "\\d+\\.x"`},
	{`payload matches "(?i)[xX]y"`, ""},
	{`len(payload) > 100`, ""},
	{`sip.method in {"INVITE" "ACK"}`, ""},
	{`dns.qname == "Example.COM."`, `dns.qname == "example.com"`},
	{"rate(ip.src) > 100/s", ""},
	{"rate(ip.src, udp.dstport) <= 5/m and udp", ""},
	{"ip.src >= 10.0.0.1", ""},
}

func TestParse(t *testing.T) {
	for _, c := range good {
		e, err := Parse(c.in)
		if err != nil {
			t.Errorf("%s: %v", c.in, err)
			continue
		}
		want := c.out
		if want == "" {
			want = c.in
		}
		if e.String() != want {
			t.Errorf("%s: prints %s, want %s", c.in, e, want)
		}
		again, err := Parse(e.String())
		if err != nil {
			t.Errorf("%s: its print: %v", c.in, err)
		} else if !same(e.Root, again.Root) {
			t.Errorf("%s: the printed form parses to a different tree", e)
		}
	}
}

// same compares trees without their positions.
func same(a, b Node) bool {
	return Print(a) == Print(b) && reflect.TypeOf(a) == reflect.TypeOf(b) && count(a) == count(b)
}

func count(n Node) (c int) {
	Walk(n, func(Node) { c++ })
	return c
}

func TestErrors(t *testing.T) {
	for _, c := range []struct {
		in      string
		column  int
		msg     string
		suggest string
	}{
		{"", 1, "ends here: want a field", ""},
		{"udp.dstprt == 53", 1, "unknown field", "udp.dstport"},
		{"ip.src == 1.2.3.4 and tcp.flag.syn", 23, "unknown field", "tcp.flags.syn"},
		{"udp.dstport == ", 16, "want a value for udp.dstport", ""},
		{"udp.dstport == 70000", 16, "16 bits", ""},
		{"udp.dstport == 010", 16, "octal", ""},
		{"udp.dstport == abc", 16, "want a number for udp.dstport", ""},
		{"udp.dstport == 99999999999999999999", 16, "16 bits", ""},
		{"udp.port in {6000..5000}", 14, "write 5000..6000", ""},
		{"udp.port in {}", 13, "without members", ""},
		{"udp.port in {1 2", 17, "no closing }", ""},
		{"udp.port in $ports", 13, "lists hold prefixes", ""},
		{"ip.src == $bogons", 11, "ip.src in $bogons", ""},
		{"ip.src == 10.0.0.1/8", 11, "bits set beyond", "10.0.0.0/8"},
		{"ip.src == 2001:db8::1", 11, "another address family", "ipv6.src"},
		{"ipv6.dst == 10.0.0.1", 13, "another address family", "ip.dst"},
		{"ip.src < 10.0.0.0/8", 10, "one address", ""},
		{"ip.src == 1.2.3", 11, "an address like 192.0.2.1", ""},
		{"(ip.src == 1.2.3.4", 19, "want )", ""},
		{"ip.src == 1.2.3.4)", 18, "want the end", ""},
		{"udp nad tcp", 5, "want the end", "and"},
		{"udp and and tcp", 9, "got and, want a field", ""},
		{"(udp and tcp) == 3", 15, "cannot be compared", ""},
		{"tcp == 3", 8, "without a value", ""},
		{"tcp.flags & 0", 13, "no bits", ""},
		{"ip.src & 1", 8, "no bits to test", ""},
		{`payload == ""`, 12, "0 bytes", ""},
		{`payload[1:3] == "abc"`, 17, "never equal", ""},
		{`payload[3:3] == "abc"`, 9, "has no byte", ""},
		{`payload[6:5] == "xyzzy"`, 9, "not [from:length]", ""},
		{`payload[3-1] == "abc"`, 9, "from 3 to 1 has no byte", ""},
		{`payload[1-9001] == "abc"`, 9, "a byte offset", ""},
		{"tcp.flags.syn == yes", 18, "want a number for tcp.flags.syn", ""},
		{`payload[1:x] == "abc"`, 9, "a byte offset", ""},
		{`udp.port[1:2] == "a"`, 9, "has no bytes", ""},
		{`payload == "abc`, 12, `no closing "`, ""},
		{`payload == "a\q"`, 14, "unknown escape", ""},
		{`payload == r"abc`, 12, `no closing "`, ""},
		{`payload == 'abc'`, 12, "texts are written", ""},
		{"udp.port = 53", 10, "= is unknown", "=="},
		{"udp.port === 53", 10, "=== is unknown: == is true if any", ""},
		{"udp.port !== 53", 10, "!== is unknown", ""},
		{`payload =~ "a"`, 9, "=~ is unknown", "matches"},
		{"udp | tcp", 5, "| is unknown", "||"},
		{"udp ^ tcp", 5, "^ is unknown", "xor"},
		{"udp.port => 53", 10, "=> is unknown", ">="},
		{"udp.port <> 53", 10, "<> is unknown", "!="},
		{"udp.port in {1-5}", 14, "got 1-5, want a number", "1..5"},
		{"ip.src in {10.0.0.1-10.0.0.9}", 12, "an address like", "10.0.0.1..10.0.0.9"},
		{"ip.src == www-1", 11, "an address like", ""},
		{"tcp.flags.syn == 2", 18, "has one bit", ""},
		{"tcp port 80", 5, "write net.port == 53", ""},
		{"host 10.0.0.1", 1, "write net.addr", ""},
		{"ip.src == 10.0.0.1, 10.0.0.2", 19, "in {a, b}", ""},
		{"arp", 1, "write eth.type == 0x0806", ""},
		{`udp.payload contains "a"`, 1, "write udp and payload", ""},
		{"any udp.port == 53", 1, "omit it", ""},
		{`payload < "a"`, 11, "by == and != only", ""},
		{`udp.port contains "a"`, 1, "not a byte sequence", ""},
		{`payload matches "a("`, 17, "missing closing", ""},
		{`payload matches "\\bfoo"`, 17, `\b is not supported`, ""},
		{`payload matches "(?m)^foo"`, 17, "(?m) is not supported", ""},
		{`sip.method == "invite"`, 15, "capital", "INVITE"},
		{"rate(ip.src) > 100", 16, "a rate like 100/s", "100/s"},
		{"rate(ip.src) > 0/s", 16, "a rate like 100/s", ""},
		{"rate(ip.src) > 9/y", 16, "per second", ""},
		{"rate(ip.addr) > 9/s", 6, "cannot be the key", ""},
		{"rate(ip.src) == 9/s", 14, "> or <=", ""},
		{"udp.port == 53 ; tcp", 16, "unexpected character ';'", ""},
		{"udp and\n  tcp.prt == 1", 3, "unknown field", "tcp.port"},
		{"eth.src == 02:00", 12, "link-layer address", ""},
		{"udp.dport == 53", 1, "unknown field", "udp.dstport"},
		{"udp.sport == 53", 1, "unknown field", "udp.srcport"},
		{"tcp.dst == 80", 1, "unknown field", "tcp.dstport"},
		{"th.dport == 80", 1, "unknown field", "net.dstport"},
		{"ip.dport == 80", 1, "unknown field", "net.dstport"},
		{"dport == 80", 1, "unknown field", "net.dstport"},
		{"udp.dprt == 53", 1, "unknown field", "udp.dstport"},
		{"ip.saddr == 10.0.0.1", 1, "unknown field", "ip.src"},
		{"ip6.daddr == 2001:db8::1", 1, "unknown field", "ipv6.dst"},
		{"tcp.saddr == 10.0.0.1", 1, "unknown field", "net.src"},
		{"ether.saddr == 02:00:00:00:00:01", 1, "unknown field", "eth.src"},
		{"ip.dscp == 46", 1, "unknown field", "ip.dsfield.dscp"},
		{"ip6.dscp == 46", 1, "unknown field", "ipv6.tclass.dscp"},
		{"ipv6.ttl < 2", 1, "unknown field", "ipv6.hlim"},
		{"ip.protocol == 6", 1, "unknown field", "ip.proto"},
		{"ipv6.nexthdr == 6", 1, "unknown field", "ipv6.nxt"},
		{"ip.frag-off > 0", 1, "unknown field", "ip.frag_offset"},
		{"tcp.syn", 1, "unknown field", "tcp.flags.syn"},
		{"vlan.vid == 3", 1, "unknown field", "vlan.id"},
		{"dscp == 46", 1, "ip.dsfield.dscp and ipv6.tclass.dscp", ""},
		{"ipv6.ah", 1, "write ipv6.nxt == 51", ""},
		{"vlan == 3", 9, "without a value; there is vlan.id", ""},
		{"vlan in {3 4}", 9, "in no set; there is vlan.id", ""},
		{"ip == 10.0.0.1", 7, "there are ip.src, ip.dst and ip.proto", ""},
		{"tcp == 80", 8, "there are tcp.srcport and tcp.dstport", ""},
		{"ip.proto == udp", 13, "the field udp alone", "17"},
		{"ipv6.nxt in {6 ah}", 16, "want a number for ipv6.nxt", "51"},
		{"eth.type == ipv4", 13, "want a number for eth.type", "0x0800"},
		{"udp.dstport == dns", 16, "want a number for udp.dstport", "53"},
		{"icmp.type == echo-request", 14, "want a number for icmp.type", "8"},
		{"tcp.flags == syn", 14, "there is tcp.flags.syn", ""},
		{"rate() > 1/s", 6, "got ), want a field: packets are counted", "rate(net.src)"},
		{"rate(", 6, "got the end, want a field", "rate(net.src)"},
		{"rate(ip.saddr) > 1/s", 6, "unknown field", "ip.src"},
		{strings.Repeat("(", 100) + "udp", 65, "nested", ""},
	} {
		_, err := Parse(c.in)
		var e *Error
		if !errors.As(err, &e) || !errors.Is(err, ErrSyntax) {
			t.Errorf("%s: %v, want an Error", c.in, err)
			continue
		}
		_, column, _ := e.Position()
		if column != c.column || !strings.Contains(e.Msg, c.msg) || e.Suggestion != c.suggest {
			t.Errorf("%s: column %d, suggestion %q: %v; want column %d, %q, suggestion %q", c.in, column, e.Suggestion, err, c.column, c.msg, c.suggest)
		}
	}
}

func TestErrorText(t *testing.T) {
	_, err := Parse("udp.dstprt == 53")
	const want = "column 1: unknown field \"udp.dstprt\"; did you mean \"udp.dstport\"?\n  udp.dstprt == 53\n  ^"
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	_, err = Parse("udp and\n\ttcp.prt")
	const two = "line 2, column 2: unknown field \"tcp.prt\"; did you mean \"tcp.port\"?\n   tcp.prt\n   ^"
	if err == nil || err.Error() != two {
		t.Errorf("got\n%v\nwant\n%s", err, two)
	}
	_, err = Parse(strings.Repeat("udp or ", 1000) + "tpc == 1 or " + strings.Repeat("udp or ", 1000) + "udp")
	if err == nil || len(err.Error()) > 600 || !strings.Contains(err.Error(), `did you mean "tcp"?`) {
		t.Errorf("a long line: %v", err)
	}
}

// Every field parses by each of its names, prints its name, and is found by its ID.
func TestFields(t *testing.T) {
	for id := range lastField {
		if id > 0 && Lookup(id) == nil {
			t.Errorf("field %d is in no table", id)
		}
	}
	for _, f := range Fields() {
		for _, name := range append([]string{f.Name}, f.Aliases...) {
			e, err := Parse(name)
			if err != nil || e.String() != f.Name {
				t.Errorf("%s: %v, %v", name, e, err)
			}
		}
		if (f.Type == Uint || f.Type == Bool) && f.Bits == 0 {
			t.Errorf("%s has no bits", f.Name)
		}
		for _, id := range f.Each() {
			if f.Link != Lookup(id).Link {
				t.Errorf("%s and its alternatives belong to different layers", f.Name)
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, c := range good {
		f.Add(c.in)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := Parse(s)
		if err != nil {
			var x *Error
			if !errors.As(err, &x) || x.Error() == "" {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		p := e.String()
		again, err := Parse(p)
		if err != nil {
			t.Fatalf("%q prints %q: %v", s, p, err)
		}
		if q := again.String(); q != p {
			t.Fatalf("%q prints %q, then %q", s, p, q)
		}
		e.Eval(&Packet{Data: []byte(s)})
	})
}

// The language's documentation names every field, and its examples parse.
func TestPage(t *testing.T) {
	b, err := os.ReadFile("../../../docs/FILTER-LANGUAGE.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	for _, f := range Fields() {
		short := f.Name[strings.LastIndexByte(f.Name, '.')+1:]
		if !strings.Contains(page, "`"+f.Name+"`") && !strings.Contains(page, "`."+short+"`") {
			t.Errorf("docs/FILTER-LANGUAGE.md does not have %s", f.Name)
		}
	}
	_, block, _ := strings.Cut(page, "```\n")
	block, _, _ = strings.Cut(block, "```")
	for _, l := range strings.Split(strings.TrimSpace(block), "\n") {
		if _, err := Parse(l); err != nil {
			t.Errorf("docs/FILTER-LANGUAGE.md: %v", err)
		}
	}
}

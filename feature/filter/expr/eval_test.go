// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"
)

// frames are packets in hexadecimal, with spaces for readability, written by hand from the RFCs.
var frames = map[string]string{
	// Ethernet, IPv4 with DSCP 46 and DF, UDP 1234 → 53, a DNS query for eXample.com, and 4 bytes of padding.
	"dns": "020000000002 020000000001 0800" + "45b80039 12344000 4011 0000 0a010203 c0000201" + "04d2 0035 0025 0000" +
		"1234 0100 0001 0000 0000 0000 07 6558616d706c65 03 636f6d 00 001c 0001" + "ffffffff",
	// IPv4, TCP SYN with MSS 1460, SACK permitted, timestamps, a no-operation and window scale 7; no payload.
	"syn": "020000000002 020000000001 0800" + "4500003c 00000000 4006 0000 0a010203 0a010204" + "c000 0050 00000001 00000000 a002 faf0 0000 0000" +
		"020405b4 0402 080a 00000064 00000000 01 030307",
	// Two tags (7 with priority 3, and 9), IPv6 with hop-by-hop options, UDP 5060 → 5060, SIP.
	"sip": "020000000002 020000000001 88a8 6007 8100 0009 86dd" + "60000000 0018 00 40 20010db8000000000000000000000001 20010db8000000000000000000000002" +
		"11 00 050200000000" + "13c4 13c4 0010 0000" + "41434b2073697000",
	// A first fragment, and a later one with a beginning like UDP to port 53.
	"first": "020000000002 020000000001 0800" + "45000020 00012000 4011 0000 0a010203 c0000201" + "04d2 0035 0100 0000" + "78797a7a",
	"later": "020000000002 020000000001 0800" + "45000020 00010003 4011 0000 0a010203 c0000201" + "04d2 0035 0100 0000" + "78797a7a",
	// A TCP header with an end before its options, and a truncated IPv4 header.
	"cut": "020000000002 020000000001 0800" + "45000028 00000000 4006 0000 0a010203 0a010204" + "c000 0050 00000001 00000000 a002 faf0 0000 0000",
	// UDP of 16 bytes and 5 more in the IP packet, then the same with length fields without this
	// information.
	"surplus": "020000000002 020000000001 0800" + "45000029 00000000 4011 0000 0a010203 c0000201" + "04d2 0035 0010 0000" + "78797a7a79 202020" + "747261696c",
	"none":    "020000000002 020000000001 0800" + "45000021 00000000 4011 0000 0a010203 c0000201" + "04d2 0035 0007 0000" + "747261696c" + "ffff",
	"jumbo":   "020000000002 020000000001 86dd" + "60000000 0000 11 40 20010db8000000000000000000000001 20010db8000000000000000000000002" + "04d2 0035 0000 0000" + "747261696c",
	"beyond":  "020000000002 020000000001 0800" + "45000021 00000000 4011 0000 0a010203 c0000201" + "04d2 0035 ffff 0000" + "747261696c" + "ffff",
	"arp":     "ffffffffffff 020000000001 0806" + "0001080006040001 020000000001 0a010203 000000000000 0a010204",
	"gre":     "020000000002 020000000001 0800" + "45000024 00000000 402f 0000 0a010203 0a010204" + "a000 0800 00000000 00000007 00000000",
}

func frame(t *testing.T, name string) *Packet {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(frames[name], " ", ""))
	if err != nil || len(b) == 0 {
		t.Fatal(name, err)
	}
	return &Packet{Data: b}
}

type list []netip.Prefix

func (l list) Contains(a netip.Addr) bool {
	for _, p := range l {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

func TestEval(t *testing.T) {
	env := &Env{Lists: map[string]Set{"tens": list{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8::/32")}}}
	for _, c := range []struct {
		frame, yes, no string // expressions, one a line
	}{
		{"dns", `
			udp.dstport == 53 and ip.src == 10.1.2.3 and eth.type == 0x800
			ip.dsfield.dscp == 46 and ip.flags.df and not ip.flags.mf and ip.ttl == 64 and ip.len == 57
			dns.qname == "example.com" and dns.qtype == 28
			udp.port == 53 and udp.port == 1234 and udp.port in {1000..2000}
			len(payload) == 29 and payload[0:2] == 12:34 and payload[-2:] == 00:01 and payload[-1] == 1
			ip.addr in $tens and net.src in $tens and ip.addr == 192.0.2.0/24
			tcp.dstport != 53 and not tcp.dstport == 53 and vlan.id != 7
			payload matches "\\x07[a-zA-Z]{7}\\x03com"
			payload contains "ample"`, `
			tcp.dstport == 53
			tcp.dstport < 100
			udp.port != 53
			ip.addr != 10.1.2.3
			payload[27:31] == 00:01:ff:ff
			dns.qname == "www.example.com"
			ip.dst in $tens
			sip.method == "INVITE"
			payload contains "example"
			ipv6`},
		{"syn", `
			tcp.flags.syn and not tcp.flags.ack and tcp.flags == 2 and tcp.flags & 0x12 and (tcp.flags & 0x3f) == 2
			tcp.options.mss_val == 1460 and tcp.options.wscale.shift == 7 and tcp.options.sack_perm
			tcp.options.timestamp.tsval == 100 and tcp.options.timestamp.tsecr == 0
			payload and len(payload) == 0 and tcp.len == 0 and tcp.hdr_len == 40
			net.dstport == 80 and net.addr == 10.1.2.4`, `
			tcp.flags & 0x10
			payload[0] != 1 and payload[0]
			udp
			payload contains "x"`},
		{"sip", `
			vlan.id == 7 and vlan.id == 9 and vlan.priority == 3 and vlan.etype == 0x86dd and eth.type == 0x88a8
			ipv6.hopopts and not ipv6.fraghdr and ipv6.nxt == 0 and udp.srcport == 5060 and ipv6.src == 2001:db8::/64
			sip.method in {"INVITE" "ACK"} and sip.method
			ipv6.src < 2001:db8::2 and net.src in $tens
			ipv6.addr in {2001:db8::2..2001:db8::9}`, `
			vlan.id != 7
			vlan.id == 8
			sip.method == "INVITE"
			ip`},
		{"first", "udp.dstport == 53 and ip.flags.mf and payload == \"xyzz\"", "ip.frag_offset > 0"},
		{"later", "ip.frag_offset == 24 and not udp and not payload and udp.dstport != 53", "udp.dstport == 53"},
		{"cut", "tcp.dstport == 80 and tcp.hdr_len == 40 and not payload and not tcp.len", "tcp.options.mss_val\nlen(payload) >= 0"},
		{"surplus", "payload == \"xyzzy   \" and payload[-3:] == \"   \" and len(payload) == 8 and udp.length == 16 and ip.len == 41", "payload contains \"trail\"\npayload[8]"},
		{"none", "payload == \"trail\" and len(payload) == 5", "udp.length != 7"},
		{"jumbo", "payload == \"trail\" and udp.length == 0", "payload[5]"},
		{"beyond", "payload == \"trail\"", "payload[5]"},
		{"arp", "eth.type == 0x806 and eth.dst == ff:ff:ff:ff:ff:ff and eth.addr == 02:00:00:00:00:01", "ip\nipv6\npayload"},
		{"gre", "gre.proto == 0x800 and gre.key == 7 and not payload", "gre.key == 0"},
	} {
		p := frame(t, c.frame)
		for want, text := range map[bool]string{true: c.yes, false: c.no} {
			for _, s := range strings.Split(text, "\n") {
				if s = strings.TrimSpace(s); s == "" {
					continue
				}
				if got := env.eval(MustParse(s), p); got != want {
					t.Errorf("%s: %s is %t", c.frame, s, got)
				}
				if got := env.eval(MustParse("not ("+s+")"), p); got == want {
					t.Errorf("%s: not (%s) is %t", c.frame, s, got)
				}
			}
		}
	}
}

// A tag removed by the kernel still counts as a tag.
func TestTags(t *testing.T) {
	p := frame(t, "dns")
	p.Tags = []Tag{{0x8100, 0x6007}}
	for _, s := range []string{"vlan.id == 7 and vlan.priority == 3", "eth.type == 0x8100 and vlan.etype == 0x800", "udp.dstport == 53"} {
		if !MustParse(s).Eval(p) {
			t.Errorf("%s is false", s)
		}
	}
}

// A rate is a bucket of as many packets as the limit. It fills in its period.
func TestRate(t *testing.T) {
	now := uint64(1e9)
	env := &Env{Now: func() uint64 { return now }}
	e, p := MustParse("rate(ip.src) > 10/s"), frame(t, "dns")
	above := func(n int) (hits int) {
		for range n {
			if env.eval(e, p) {
				hits++
			}
		}
		return hits
	}
	if n := above(15); n != 5 {
		t.Errorf("15 packets at once: got %d above 10/s, want 5", n)
	}
	now += 300_000_000
	if n := above(5); n != 2 {
		t.Errorf("5 packets after 0.3 s: got %d above 10/s, want 2", n)
	}
	now += 60_000_000_000
	if n := above(11); n != 1 {
		t.Errorf("11 packets after a minute: got %d above 10/s, want 1", n)
	}
	if env.eval(MustParse("rate(ipv6.src) > 1/h or rate(ipv6.src) <= 1/h"), p) {
		t.Error("a comparison with the rate of an absent field is true, want false")
	}
}

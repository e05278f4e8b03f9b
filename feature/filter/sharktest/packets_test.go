// SPDX-License-Identifier: Apache-2.0

package sharktest

import "strings"

// Protocol numbers in IP headers.
const (
	pHopOpts  = 0
	pICMP     = 1
	pIPIP     = 4
	pTCP      = 6
	pUDP      = 17
	p6in4     = 41
	pRouting  = 43
	pFragment = 44
	pGRE      = 47
	pAH       = 51
	pICMP6    = 58
	pNone     = 59
	pDstOpts  = 60
	pSCTP     = 132
)

func ip4(label string, proto byte, body []byte, edits ...edit) packet {
	return packet{label: label, data: frame(0x0800, v4(proto, body, edits...))}
}

func ip6(label string, next byte, body []byte, edits ...edit) packet {
	return packet{label: label, data: frame(0x86dd, v6(next, body, edits...))}
}

func (p packet) cut(n int) packet {
	p.wire = max(p.wire, len(p.data))
	p.data = p.data[:n]
	return p
}

func (p packet) padded(with string) packet {
	p.data = append(p.data, with...)
	return p
}

// generated returns the project's own capture, because real ones are mostly of BGP, BMP and IPFIX.
func generated() []packet {
	var all []packet
	for _, some := range [][]packet{linkPackets(), ip4Packets(), ip6Packets(), tcpPackets(), udpPackets(), textPackets(), icmpPackets(), grePackets(), innerPackets(), brokenPackets()} {
		all = append(all, some...)
	}
	return all
}

func linkPackets() []packet {
	one := frame(0x0800, v4(pUDP, udp(1000, 9999, "tagged")))
	arp := frame(0x0806, []byte("\x00\x01\x08\x00\x06\x04\x00\x01"+clientMAC+client4+zeros(6)+server4))
	other := frame(0x88b5, []byte("local experiment"))
	copy(other, "\xff\xff\xff\xff\xff\xff")
	return []packet{
		{label: "arp", data: arp},
		{label: "experimental EtherType", data: other},
		{label: "802.3 length", data: frame(38, []byte("\x42\x42\x03"+zeros(35)))},
		{label: "vlan", data: tagged(one, 0x8100, 100)},
		{label: "vlan priority", data: tagged(one, 0x8100, 5<<13|7)},
		{label: "vlan dei", data: tagged(one, 0x8100, 1<<12|4095)},
		{label: "vlan arp", data: tagged(arp, 0x8100, 100)},
		{label: "vlan ipv6", data: tagged(frame(0x86dd, v6(pUDP, udp(1000, 9999, "tagged"))), 0x8100, 200)},
		{label: "two tags", data: tagged(one, 0x8100, 100, 0x8100, 200)},
		{label: "QinQ", data: tagged(one, 0x88a8, 3<<13|300, 0x8100, 200)},
		{label: "QinQ twice", data: tagged(one, 0x88a8, 300, 0x88a8, 400)},
		{label: "three tags", data: tagged(one, 0x8100, 100, 0x8100, 200, 0x8100, 500)},
	}
}

func ip4Packets() []packet {
	body := udp(1000, 9999, "payload")
	long := udp(1000, 9999, "of a datagram that comes in fragments of so many bytes", put16(4, 100))
	out := []packet{
		ip4("dscp", pUDP, body, put8(1, 46<<2)),
		ip4("ecn", pUDP, body, put8(1, 3)),
		ip4("df", pUDP, body, put16(6, 0x4000)),
		ip4("evil bit", pUDP, body, put16(6, 0x8000)),
		ip4("id", pUDP, body, put16(4, 0xffff)),
		ip4("ttl 1", pUDP, body, put8(8, 1)),
		ip4("ttl 255", pUDP, body, put8(8, 255)),
		ip4("multicast", pUDP, body, addresses(12, client4, "\xe0\x00\x00\x05")),
		ip4("broadcast", pUDP, body, addresses(12, zeros(4), "\xff\xff\xff\xff")),
		ip4("to the client", pUDP, body, addresses(12, server4, client4)),
		ip4("sctp", pSCTP, []byte("\x03\xe8\x27\x0f"+zeros(8)+"\x0b\x00\x00\x04")),
		ip4("unknown protocol", 253, []byte("experiment")),
		ip4("first fragment", pUDP, long[:48], put16(6, 0x2000)),
		ip4("middle fragment", pUDP, []byte("\x03\xe8\x27\x0f in the middle!!"), put16(6, 0x2000|6)),
		ip4("last fragment", pUDP, long[48:], put16(6, 6)),
		ip4("padding", pUDP, udp(1000, 9999, "pad")).padded("xyzzy and more bytes"),
		ip4("ipv4 authentication", pAH, extension(pUDP, 4, "\x00\x00\x00\x00\x01\x00\x00\x00\x00\x01"+zeros(12), body)),
	}
	for _, o := range [][2]string{{"router alert", "\x94\x04\x00\x00"}, {"record route", "\x07\x27\x04" + zeros(36) + "\x00"}} {
		out = append(out, packet{label: o[0], data: frame(0x0800, v4opt(o[1], pUDP, body))})
	}
	return out
}

func ip6Packets() []packet {
	body := udp(1000, 9999, "payload")
	segments := pad8("\x04\x01\x01\x00\x00\x00" + server6 + inner6a)
	pad := "\x01\x04\x00\x00\x00\x00"
	return []packet{
		ip6("ipv6 udp", pUDP, body),
		ip6("ipv6 tcp", pTCP, tcp(1000, 179, syn, "\x02\x04\x05\xa0", "")),
		ip6("ipv6 class and flow", pUDP, body, put32(0, 0x60000000|46<<22|2<<20|0x12345)),
		ip6("ipv6 hop limit", pUDP, body, put8(7, 1)),
		ip6("ipv6 link-local", pUDP, body, addresses(8, "\xfe\x80"+zeros(13)+"\x01", "\xff\x02"+zeros(13)+"\x01")),
		ip6("hop-by-hop", pHopOpts, extension(pUDP, 0, pad, body)),
		ip6("destination options", pDstOpts, extension(pUDP, 0, pad, body)),
		ip6("routing", pRouting, extension(pUDP, 4, segments, body)),
		ip6("three extensions", pHopOpts, extension(pRouting, 0, pad, extension(pDstOpts, 4, segments, extension(pTCP, 0, pad, tcp(1000, 443, syn, "", ""))))),
		ip6("authentication", pAH, extension(pUDP, 4, "\x00\x00\x00\x00\x01\x00\x00\x00\x00\x01"+zeros(12), body)),
		ip6("ipv6 first fragment", pFragment, extension(pUDP, 0, "\x00\x01\x00\x00\x00\x07", body[:8])),
		ip6("options in a first fragment", pFragment, extension(pDstOpts, 0, "\x00\x01\x00\x00\x00\x07", extension(pUDP, 0, pad, body))),
		ip6("ipv6 later fragment", pFragment, extension(pUDP, 0, "\x00\x08\x00\x00\x00\x07", body[8:])),
		ip6("atomic fragment", pFragment, extension(pUDP, 0, "\x00\x00\x00\x00\x00\x08", body)),
		ip6("no next header", pNone, nil),
		ip6("nine extensions", pDstOpts, nine(pad, body)),
		ip6("ipv6 padding", pUDP, body).padded("xyzzy"),
	}
}

// nine returns the rest of a packet with nine destination options headers. The first is already
// announced.
func nine(pad string, body []byte) []byte {
	next := byte(pUDP)
	for range 9 {
		body = extension(next, 0, pad, body)
		next = pDstOpts
	}
	return body
}

func pad8(s string) string {
	for (len(s)+2)%8 != 0 {
		s += "\x00"
	}
	return s
}

func tcpPackets() []packet {
	return []packet{
		ip4("syn", pTCP, tcp(40000, 80, syn, "\x02\x04\x05\xb4\x04\x02\x08\x0a\x00\x00\x10\x00\x00\x00\x00\x00\x01\x03\x03\x07", "")),
		ip4("syn, small mss", pTCP, tcp(40001, 80, syn, "\x02\x04\x00\xd8", "")),
		ip4("syn ack", pTCP, tcp(80, 40000, syn|ack, "\x02\x04\x05\xb4\x01\x03\x03\x00\x08\x0a\x00\x00\x20\x00\x00\x00\x10\x00", "")),
		ip4("ack", pTCP, tcp(40000, 80, ack, "\x01\x01\x08\x0a\x00\x00\x10\x01\x00\x00\x20\x00", "", put32(4, 1001))),
		ip4("tcp data", pTCP, tcp(40000, 9998, psh|ack, "", "hello xyzzy, tcp", put32(4, 4000000000))),
		ip4("long tcp", pTCP, tcp(40000, 9998, ack, "", zeros(1400))),
		ip4("one byte of tcp", pTCP, tcp(40000, 9998, psh|ack, "", "x")),
		ip4("bgp", pTCP, tcp(40000, 9998, psh|ack, "", strings.Repeat("\xff", 16)+"\x00\x13\x04")),
		ip4("bmp", pTCP, tcp(40000, 9998, psh|ack, "", "\x03\x00\x00\x00\x06\x04")),
		ip4("fin", pTCP, tcp(40000, 9998, fin|ack, "", "")),
		ip4("reset", pTCP, tcp(40000, 9998, rst, "", "", put16(14, 0))),
		ip4("urgent", pTCP, tcp(40000, 9998, urg|ack, "", "!!!", put16(18, 3))),
		ip4("ece cwr", pTCP, tcp(40002, 9998, syn|ece|cwr, "", "")),
		ip4("accurate ECN", pTCP, tcp(40003, 9998, syn|ae|ece|cwr, "", "")),
		ip4("all flags", pTCP, tcp(40004, 9998, 0xfff, "", "")),
		ip4("no flags", pTCP, tcp(40004, 9998, 0, "", "")),
		ip4("sack", pTCP, tcp(40000, 9998, ack, "\x01\x01\x05\x0a"+zeros(8), "")),
		ip4("reset with a cause", pTCP, tcp(40000, 9998, rst|ack, "", "hello xyzzy, gone")),
		ip4("mss twice", pTCP, tcp(40005, 9998, syn, "\x02\x04\x05\xb4\x02\x04\x00\x64", "")),
		ip4("end of options", pTCP, tcp(40006, 9998, syn, "\x00\x00\x00\x00\x02\x04\x02\x18", "")),
	}
}

func udpPackets() []packet {
	return []packet{
		ip4("empty", pUDP, udp(1000, 9999, "")),
		ip4("one byte", pUDP, udp(1000, 9999, "x")),
		ip4("xyzzy at the end", pUDP, udp(1000, 9999, "hello xyzzy")),
		ip4("xyzzy at the start", pUDP, udp(1000, 9999, "xyzzy, hello")),
		ip4("XYZZY", pUDP, udp(1000, 9999, "hello XYZZY 42")),
		ip4("bytes", pUDP, udp(1000, 9999, "\x16\x03\x01\x02\x00\xff\x00\x80")),
		ip4("numbers", pUDP, udp(1000, 9999, "call 555-1234 now")),
		ip4("xyzzy behind 256 bytes", pUDP, udp(1000, 9999, string(make([]byte, 300))+"xyzzy")),
		ip4("no checksum", pUDP, udp(1000, 9999, "x", put16(6, 0))),
		ip4("high ports", pUDP, udp(65535, 65534, "x")),
		ip4("port 0", pUDP, udp(0, 9999, "x")),
		ip4("ipfix", pUDP, udp(40000, 9991, "\x00\x0a\x00\x10\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x03"), addresses(12, "\xcb\x00\x71\x5a", server4)),
		ip4("long udp", pUDP, udp(1000, 9999, zeros(1400))),
		ip6("long ipv6 udp", pUDP, udp(1000, 9999, zeros(1400))),
		ip4("longer than a page", pUDP, udp(1000, 9999, zeros(9000)+"end")),
		ip4("surplus", pUDP, udp(1000, 9999, "hello xyzzytrail", put16(4, 8+11))),
		ip6("ipv6 surplus", pUDP, udp(1000, 9999, "hello xyzzytrail", put16(4, 8+11))),
		ip4("all surplus", pUDP, udp(1000, 9999, "xyzzytrail", put16(4, 8))),
		ip4("dns surplus", pUDP, udp(5000, 53, question("\x07example\x03com\x00", 1)+"trail", put16(4, 8+29))),
		ip4("syslog", pUDP, udp(514, 9999, "<13>x")),
	}
}

func textPackets() []packet {
	const example, www = "\x07example\x03com\x00", "\x03www\x07example\x03com\x00"
	response := "\x12\x34\x81\x80\x00\x01\x00\x01\x00\x00\x00\x00" + www + "\x00\x01\x00\x01\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04" + server4
	two := "\x12\x34\x01\x00\x00\x02\x00\x00\x00\x00\x00\x00" + example + "\x00\x01\x00\x01" + www + "\x00\x1c\x00\x01"
	query := question(example, 1)
	return []packet{
		ip4("dns A", pUDP, udp(5000, 53, query)),
		ip4("dns AAAA", pUDP, udp(5000, 53, question(www, 28))),
		ip4("dns ANY", pUDP, udp(5000, 53, question(example, 255))),
		ip4("dns TXT", pUDP, udp(5000, 53, question("\x04_acm"+example, 16))),
		ip4("dns case", pUDP, udp(5000, 53, question("\x07eXample\x03COM\x00", 1))),
		ip4("dns root", pUDP, udp(5000, 53, question("\x00", 2))),
		ip4("dns response", pUDP, udp(53, 5000, response)),
		ip4("dns no question", pUDP, udp(53, 5000, "\x12\x34\x81\x80\x00\x00\x00\x00\x00\x00\x00\x00")),
		ip4("dns two questions", pUDP, udp(5000, 53, two)),
		ip6("dns ipv6", pUDP, udp(5000, 53, query)),
		ip4("dns elsewhere", pUDP, udp(5000, 9999, query)),
		ip4("dns tcp", pTCP, tcp(5000, 53, psh|ack, "", "\x00\x1d"+query)),
		ip4("sip INVITE", pUDP, udp(5060, 5060, sip("INVITE"))),
		ip4("sip REGISTER", pUDP, udp(5062, 5060, sip("REGISTER"))),
		ip6("sip ipv6", pUDP, udp(5060, 5060, sip("INVITE"))),
		ip4("sip response", pUDP, udp(5060, 5060, "SIP/2.0 200 OK\r\nCSeq: 1 INVITE\r\nContent-Length: 0\r\n\r\n")),
		ip4("sip tcp", pTCP, tcp(5061, 5060, psh|ack, "", sip("OPTIONS"))),
		ip4("sip elsewhere", pUDP, udp(1000, 9999, sip("INVITE"))),
		ip4("http", pTCP, tcp(40010, 80, psh|ack, "", "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")),
	}
}

func icmpPackets() []packet {
	quoted := string(v4(pUDP, udp(7000, 7001, "lost"), addresses(12, inner4a, inner4b)))
	quoted6 := string(v6(pUDP, udp(7000, 7001, "lost"), addresses(8, inner6a, inner6b)))
	solicited := "\x87\x00\x12\x34\x00\x00\x00\x00" + server6 + "\x01\x01" + clientMAC
	return []packet{
		ip4("echo request", pICMP, []byte("\x08\x00\xab\xcd\x12\x34\x00\x07ping")),
		ip4("echo reply", pICMP, []byte("\x00\x00\xab\xcd\x12\x34\x00\x07ping")),
		ip4("echo, same both ways", pICMP, []byte("\x08\x00\xab\xcd\x22\x22\x01\x01ping")),
		ip4("timestamp request", pICMP, []byte("\x0d\x00\xab\xcd\x12\x34\x00\x08"+zeros(12))),
		ip6("icmp in ipv6", pICMP, []byte("\x08\x00\xab\xcd\x55\x55\x00\x09ping")),
		ip4("icmpv6 in ipv4", pICMP6, []byte("\x80\x00\xab\xcd\x12\x34\x00\x07ping")),
		ip4("port unreachable", pICMP, []byte("\x03\x03\xab\xcd\x00\x00\x00\x00"+quoted)),
		ip4("fragmentation needed", pICMP, []byte("\x03\x04\xab\xcd\x00\x00\x05\x78"+quoted)),
		ip4("time exceeded", pICMP, []byte("\x0b\x00\xab\xcd\x00\x00\x00\x00"+quoted)),
		ip4("redirect", pICMP, []byte("\x05\x01\xab\xcd"+client4+quoted)),
		ip6("ipv6 echo request", pICMP6, []byte("\x80\x00\xab\xcd\x12\x34\x00\x07ping")),
		ip6("ipv6 echo reply", pICMP6, []byte("\x81\x00\xab\xcd\x12\x34\x00\x07ping")),
		ip6("neighbour solicitation", pICMP6, []byte(solicited)),
		ip6("ipv6 packet too big", pICMP6, []byte("\x02\x00\xab\xcd\x00\x00\x05\x00"+quoted6)),
		ip6("ipv6 port unreachable", pICMP6, []byte("\x01\x04\xab\xcd\x00\x00\x00\x00"+quoted6)),
		ip6("ipv6 echo behind options", pHopOpts, extension(pICMP6, 0, "\x05\x02\x00\x00\x01\x00", []byte("\x80\x00\xab\xcd\x12\x34\x00\x07ping"))),
	}
}

// Inner packets of tunnels have their own addresses and ports.
var (
	inner4 = string(v4(pUDP, udp(7000, 7001, "inside"), addresses(12, inner4a, inner4b), put8(8, 33), put16(4, 0x7777)))
	inner6 = string(v6(pUDP, udp(7000, 7001, "inside"), addresses(8, inner6a, inner6b), put8(7, 33)))
)

func grePackets() []packet {
	return []packet{
		ip4("gre", pGRE, []byte("\x00\x00\x88\xb5something")),
		ip4("gre key", pGRE, []byte("\x20\x00\x88\xb5\x00\x00\x00\x2asomething")),
		ip4("gre checksum and key", pGRE, []byte("\xa0\x00\x88\xb5\x12\x34\x00\x00\x00\x00\x00\x2bsomething")),
		ip4("gre sequence", pGRE, []byte("\x10\x00\x88\xb5\x00\x00\x00\x07something")),
		ip6("gre ipv6 outside", pGRE, []byte("\x20\x00\x88\xb5\x00\x00\x00\x2asomething")),
		ip4("gre ipv4 inside", pGRE, []byte("\x00\x00\x08\x00"+inner4)),
		ip4("gre ipv6 inside", pGRE, []byte("\x20\x00\x86\xdd\x00\x00\x00\x2a"+inner6)),
	}
}

// innerPackets carry other packets: weir reads only the outermost headers.
func innerPackets() []packet {
	return []packet{
		ip4("ipip", pIPIP, []byte(inner4)),
		ip4("6in4", p6in4, []byte(inner6)),
		ip6("4in6", pIPIP, []byte(inner4)),
		ip6("6in6", p6in4, []byte(inner6)),
		ip4("vxlan", pUDP, udp(40000, 4789, "\x08\x00\x00\x00\x00\x00\x2a\x00"+string(frame(0x0800, []byte(inner4))))),
		{label: "mpls", data: frame(0x8847, []byte("\x00\x01\x01\x40"+inner4))},
		{label: "pppoe", data: frame(0x8864, []byte("\x11\x00\x00\x01\x00\x24\x00\x21"+inner4))},
	}
}

func brokenPackets() []packet {
	u := func(label string) packet { return ip4(label, pUDP, udp(1000, 9999, "payload of a cut packet")) }
	c := func(label string, options string) packet {
		return ip4(label, pTCP, tcp(40000, 9998, syn, options, "cut"))
	}
	return []packet{
		u("cut in ethernet").cut(13),
		u("cut behind ethernet").cut(14),
		u("cut in ipv4").cut(14 + 19),
		u("cut behind ipv4").cut(14 + 20),
		u("cut in udp").cut(14 + 20 + 7),
		u("cut behind udp").cut(14 + 20 + 8),
		u("cut in the payload").cut(14 + 20 + 8 + 7),
		c("cut in tcp", "").cut(14 + 20 + 19),
		c("cut in tcp options", "\x02\x04\x05\xb4\x03\x03\x07").cut(14 + 20 + 24),
		ip6("cut in ipv6", pUDP, udp(1000, 9999, "cut")).cut(14 + 39),
		ip6("cut in hop-by-hop", pHopOpts, extension(pUDP, 1, zeros(14), udp(1000, 9999, "cut"))).cut(14 + 40 + 12),
		{label: "cut in a vlan tag", data: tagged(frame(0x0800, nil), 0x8100, 100)[:16], wire: 60},
		ip4("short udp", pUDP, udp(1000, 9999, "")[:6]),
		ip4("short tcp", pTCP, tcp(1000, 9998, syn, "", "")[:12]),
		ip4("short icmp", pICMP, []byte("\x08\x00\xab\xcd")),
		ip4("short gre", pGRE, []byte("\x20\x00")),
		ip4("gre without its key", pGRE, []byte("\x20\x00\x88\xb5\x00\x00")),
		ip4("ipv4 version 5", pUDP, udp(1000, 9999, "x"), put8(0, 0x55)),
		ip4("ipv4 header of 16", pUDP, udp(1000, 9999, "x"), put8(0, 0x44)),
		ip4("ipv4 header beyond the packet", pUDP, udp(1000, 9999, "x"), put8(0, 0x4f)),
		ip4("ipv4 length 0", pUDP, udp(1000, 9999, "merged"), put16(2, 0)),
		ip4("ipv4 length 10", pUDP, udp(1000, 9999, "x"), put16(2, 10)),
		ip4("ipv4 length in udp", pUDP, udp(1000, 9999, "x"), put16(2, 24)),
		ip4("ipv4 length in the payload", pUDP, udp(1000, 9999, "payload"), put16(2, 31)),
		ip4("ipv4 length beyond", pUDP, udp(1000, 9999, "payload"), put16(2, 1000)),
		ip6("ipv6 length 0", pUDP, udp(1000, 9999, "x"), put16(4, 0)),
		ip6("ipv6 length beyond", pUDP, udp(1000, 9999, "payload"), put16(4, 1000)),
		ip4("udp length 0", pUDP, udp(1000, 9999, "payload", put16(4, 0))),
		ip4("udp length 7", pUDP, udp(1000, 9999, "payload", put16(4, 7))),
		ip4("udp length in the payload", pUDP, udp(1000, 9999, "payload", put16(4, 11))),
		ip4("udp length beyond", pUDP, udp(1000, 9999, "payload", put16(4, 1000))),
		ip4("tcp header of 16", pTCP, tcp(40000, 9998, syn, "", "x", put16(12, 0x4002))),
		ip4("tcp header beyond", pTCP, tcp(40000, 9998, syn, "", "x", put16(12, 0xf002))),
		ip4("mss option of 3", pTCP, tcp(40007, 9998, syn, "\x02\x03\x05\x01", "")),
		ip4("option of length 0", pTCP, tcp(40007, 9998, syn, "\x1e\x00\x02\x04\x05\xb4", "")),
		ip4("option beyond the header", pTCP, tcp(40007, 9998, syn, "\x02\x04\x05\xb4\x08\x0a\x00\x00", "")),
		ip4("dns cut", pUDP, udp(5000, 53, question("\x07example\x03com\x00", 1)[:20])),
		ip4("dns pointer", pUDP, udp(5000, 53, question("\xc0\x0c", 1))),
	}
}

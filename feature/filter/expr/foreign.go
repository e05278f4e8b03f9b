// SPDX-License-Identifier: Apache-2.0

package expr

// foreign are fields and words of Wireshark's and of capture filters that people try first, and what says here what they
// mean.
var foreign = map[string]string{
	"udp.payload":     `write udp and payload…`,
	"tcp.payload":     `write tcp and payload…`,
	"data":            `write payload…`,
	"data.data":       `write payload…`,
	"frame":           `the bytes behind the headers are payload`,
	"frame.len":       `there are ip.len, ipv6.plen and len(payload)`,
	"frame.cap_len":   `there are ip.len, ipv6.plen and len(payload)`,
	"frame.number":    `rules see one packet, and not its place in a capture`,
	"frame.time":      `rules see one packet, and not when it came; there is rate(…)`,
	"arp":             `write eth.type == 0x0806`,
	"http":            `there is payload, as in payload[0:4] == "GET "`,
	"tls":             `there is payload, as in payload[0:2] == 16:03`,
	"dns":             `there are dns.qname and dns.qtype; or write net.port == 53`,
	"sip":             `there is sip.method; or write net.port == 5060`,
	"sctp":            `write ip.proto == 132 or ipv6.nxt == 132`,
	"esp":             `write ip.proto == 50 or ipv6.nxt == 50`,
	"ip.tos":          `there are ip.dsfield.dscp and ip.dsfield.ecn`,
	"ip.dsfield":      `there are ip.dsfield.dscp and ip.dsfield.ecn`,
	"ip.flags":        `there are ip.flags.df and ip.flags.mf`,
	"ipv6.tclass":     `there are ipv6.tclass.dscp and ipv6.tclass.ecn`,
	"tcp.window_size": `rules see one packet, and not the scale that its connection agreed on: there is tcp.window_size_value`,
	"tcp.stream":      `rules see one packet: name the connection's addresses and ports`,
	"tcp.flags.ns":    `write tcp.flags & 0x100`,
	"tcp.flags.ae":    `write tcp.flags & 0x100`,
	"ieee8021ad.id":   `it is among vlan.id, as all tags are`,
	"port":            `write net.port == 53, or udp.dstport == 53`,
	"host":            `write net.addr == 192.0.2.1`,
	"src":             `write net.src == 192.0.2.1`,
	"dst":             `write net.dst == 192.0.2.1`,
	"net":             `write net.addr == 192.0.2.0/24`,
	"any":             `it can be left out: a field that a packet has several times is equal if any of them is`,
	"all":             `a field that a packet has several times is equal if any of them is, and != if none is`,
}

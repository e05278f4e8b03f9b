// SPDX-License-Identifier: Apache-2.0

package sharktest

// side is the only tool with a match.
type side string

const (
	weirOnly  side = "weir"
	sharkOnly side = "tshark"
)

// reason explains packets matched by one tool only: packets of the generated capture by label, or
// all packets of a display filter.
type reason struct {
	why    string
	only   side
	labels []string
	where  string
}

// Documented differences in dissecting a packet, see docs/FILTER-LANGUAGE.md.
var (
	carried = reason{why: "weir does not dissect packets inside tunnels and ICMP errors", only: sharkOnly, labels: []string{"port unreachable", "fragmentation needed", "time exceeded", "redirect",
		"ipv6 packet too big", "ipv6 port unreachable", "gre ipv4 inside", "gre ipv6 inside", "ipip", "6in4", "4in6", "6in6", "vxlan", "mpls", "pppoe"}}
	cutHeaders   = reason{why: "a cut header is absent in weir, but Wireshark shows its present part", only: sharkOnly, labels: []string{"short udp", "short tcp", "ipv4 length in udp"}}
	partOfTCP    = reason{why: "in a cut header, fields with all their bytes have values in weir; Wireshark stops after the ports", only: weirOnly, labels: []string{"short tcp"}}
	wrongIPv4    = reason{why: "an IPv4 header with a wrong version or length is absent in weir, but Wireshark shows it", only: sharkOnly, labels: []string{"ipv4 version 5", "ipv4 header of 16"}}
	givenUpIPv4  = reason{why: "Wireshark rejects an IPv4 header with a total length below the header length", only: weirOnly, labels: []string{"ipv4 header beyond the packet", "ipv4 length 10"}}
	givenUpTCP   = reason{why: "Wireshark rejects a TCP header with a length below 20", only: weirOnly, labels: []string{"tcp header of 16"}}
	givenUpUDP   = reason{why: "Wireshark rejects a UDP header with a length below 8", only: weirOnly, labels: []string{"udp length 0", "udp length 7"}}
	noLength     = reason{why: "with a length of 0, the packet extends to the end of the bytes: Linux merges packets to more than 64 KiB", only: weirOnly, labels: []string{"ipv6 length 0"}}
	surplus      = reason{why: "the payload ends with the UDP datagram, in Wireshark with the IP packet", only: weirOnly, labels: []string{"surplus", "ipv6 surplus"}}
	surplusFound = reason{why: surplus.why, only: sharkOnly, labels: []string{"surplus", "ipv6 surplus", "dns surplus"}}
	otherFamily  = reason{why: "weir accepts ICMP only in IPv4, and ICMPv6 only in IPv6", only: sharkOnly, labels: []string{"icmp in ipv6", "icmpv6 in ipv4"}}
	secondOption = reason{why: "weir uses the last of several TCP options of one kind", only: sharkOnly, labels: []string{"mss twice"}}
	resetCause   = reason{why: "the bytes after a reset's header are payload in weir, but the reset's cause in Wireshark", only: weirOnly, labels: []string{"reset with a cause"}}
	wrongOption  = reason{why: "a TCP option with a wrong length is absent in weir", only: sharkOnly, labels: []string{"mss option of 3"}}
	length8023   = reason{why: "eth.type is the two bytes after the addresses, even if they hold the length of an 802.3 frame", only: weirOnly, labels: []string{"802.3 length"}}
	serviceTags  = reason{why: "a service tag (802.1ad) is a VLAN tag in weir; Wireshark has the ieee8021ad fields for it", only: weirOnly, labels: []string{"QinQ"}}
)

// Documented differences of the language (docs/FILTER-LANGUAGE.md, "Coming from Wireshark").
var (
	absentField      = reason{why: "x != y is true if x is absent", only: weirOnly, where: "not udp"}
	flagAlone        = reason{why: "a one-bit field alone is true if the bit is set, in Wireshark if the field is present", only: sharkOnly, where: "tcp.flags.syn == 0"}
	relative         = reason{why: "sequence numbers are the header's, in Wireshark relative to the first", only: weirOnly, where: "tcp.seq_raw == 1000 and not tcp.seq == 1000"}
	caseless         = reason{why: "patterns are case-sensitive, in Wireshark case-insensitive", only: sharkOnly, labels: []string{"XYZZY"}}
	window           = reason{why: "contains and matches search 256 bytes", only: sharkOnly, where: "len(udp.payload) > 256"}
	icmpWithoutIdent = reason{why: "icmp.ident is bytes 4 and 5 for every type", only: weirOnly, labels: []string{"port unreachable", "fragmentation needed", "time exceeded"}}
	dnsElsewhere     = reason{why: "dns.qname and dns.qtype work on any UDP port", only: weirOnly, labels: []string{"dns elsewhere"}}
	dnsAnyPort       = reason{why: "dns.qname and dns.qtype work on any UDP port: a payload with the form of a question is a question", only: weirOnly, where: "udp and not udp.port == 53"}
	dnsCase          = reason{why: "domain names are compared without case", only: weirOnly, labels: []string{"dns case"}}
	dnsTCP           = reason{why: "weir does not dissect DNS over TCP", only: sharkOnly, labels: []string{"dns tcp"}}
	dnsPointer       = reason{why: "weir rejects a pointer in a question's name", only: sharkOnly, labels: []string{"dns pointer"}}
	secondQuestion   = reason{why: "weir uses the first question only", only: sharkOnly, labels: []string{"dns two questions"}}
	sipElsewhere     = reason{why: "sip.method works on any port, and matches any protocol with methods", only: weirOnly, labels: []string{"sip elsewhere", "http"}}
)

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

// Documented differences in dissecting a packet, see docs/FILTER.md.
var (
	carried = reason{why: "what tunnels and ICMP errors carry is not looked at", only: sharkOnly, labels: []string{"port unreachable", "fragmentation needed", "time exceeded", "redirect",
		"ipv6 packet too big", "ipv6 port unreachable", "gre ipv4 inside", "gre ipv6 inside", "ipip", "6in4", "4in6", "6in6", "vxlan", "mpls", "pppoe"}}
	cutHeaders   = reason{why: "a header that is not whole is absent, and Wireshark shows what is there of it", only: sharkOnly, labels: []string{"short udp", "short tcp", "ipv4 length in udp"}}
	partOfTCP    = reason{why: "fields whose bytes are there have values, and Wireshark gives up behind the ports", only: weirOnly, labels: []string{"short tcp"}}
	wrongIPv4    = reason{why: "an IPv4 header whose version or length is wrong is absent, and Wireshark shows it", only: sharkOnly, labels: []string{"ipv4 version 5", "ipv4 header of 16"}}
	givenUpIPv4  = reason{why: "Wireshark gives an IPv4 header up whose total length is less than its own", only: weirOnly, labels: []string{"ipv4 header beyond the packet", "ipv4 length 10"}}
	givenUpTCP   = reason{why: "Wireshark gives a TCP header up whose length is less than 20", only: weirOnly, labels: []string{"tcp header of 16"}}
	givenUpUDP   = reason{why: "Wireshark gives a UDP header up whose length is less than 8", only: weirOnly, labels: []string{"udp length 0", "udp length 7"}}
	noLength     = reason{why: "a length of 0 goes on to the end of the bytes: Linux merges packets to ones above 64 KiB", only: weirOnly, labels: []string{"ipv6 length 0"}}
	surplus      = reason{why: "the payload ends with the UDP datagram, and Wireshark's with the IP packet", only: weirOnly, labels: []string{"surplus", "ipv6 surplus"}}
	surplusFound = reason{why: surplus.why, only: sharkOnly, labels: []string{"surplus", "ipv6 surplus", "dns surplus"}}
	otherFamily  = reason{why: "ICMP is of IPv4, and ICMPv6 of IPv6", only: sharkOnly, labels: []string{"icmp in ipv6", "icmpv6 in ipv4"}}
	secondOption = reason{why: "of TCP options of one kind the last counts", only: sharkOnly, labels: []string{"mss twice"}}
	resetCause   = reason{why: "what follows the header of a reset is payload, and for Wireshark the reset's cause", only: weirOnly, labels: []string{"reset with a cause"}}
	wrongOption  = reason{why: "a TCP option of a wrong length is absent", only: sharkOnly, labels: []string{"mss option of 3"}}
	length8023   = reason{why: "eth.type is the two bytes behind the addresses, also where they are the length of an 802.3 frame", only: weirOnly, labels: []string{"802.3 length"}}
	serviceTags  = reason{why: "a service tag (802.1ad) is a tag as any other; Wireshark has ieee8021ad fields for it", only: weirOnly, labels: []string{"QinQ"}}
)

// Documented differences of the language (docs/FILTER.md, "Coming from Wireshark").
var (
	absentField      = reason{why: "x != y is true where there is no x", only: weirOnly, where: "not udp"}
	flagAlone        = reason{why: "a field of one bit alone asks whether it is set, not whether it is there", only: sharkOnly, where: "tcp.flags.syn == 0"}
	relative         = reason{why: "sequence numbers are those of the header, and in Wireshark relative to the first", only: weirOnly, where: "tcp.seq_raw == 1000 and not tcp.seq == 1000"}
	caseless         = reason{why: "patterns tell upper from lower case, and those of Wireshark do not", only: sharkOnly, labels: []string{"XYZZY"}}
	window           = reason{why: "contains and matches look at 256 bytes", only: sharkOnly, where: "len(udp.payload) > 256"}
	icmpWithoutIdent = reason{why: "icmp.ident is bytes 4 and 5 whatever the type", only: weirOnly, labels: []string{"port unreachable", "fragmentation needed", "time exceeded"}}
	dnsElsewhere     = reason{why: "dns.qname and dns.qtype ask of any UDP port", only: weirOnly, labels: []string{"dns elsewhere"}}
	dnsAnyPort       = reason{why: "dns.qname and dns.qtype ask of any UDP port: what looks like a question is one", only: weirOnly, where: "udp and not udp.port == 53"}
	dnsCase          = reason{why: "domain names are equal whatever their case", only: weirOnly, labels: []string{"dns case"}}
	dnsTCP           = reason{why: "DNS over TCP is not looked at", only: sharkOnly, labels: []string{"dns tcp"}}
	dnsPointer       = reason{why: "a question's name has no pointer", only: sharkOnly, labels: []string{"dns pointer"}}
	secondQuestion   = reason{why: "the first question counts", only: sharkOnly, labels: []string{"dns two questions"}}
	sipElsewhere     = reason{why: "sip.method asks of any port, and of any protocol with methods", only: weirOnly, labels: []string{"sip elsewhere", "http"}}
)

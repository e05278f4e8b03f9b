// SPDX-License-Identifier: Apache-2.0

package expr

// Type is the type of a field's values.
type Type uint8

// The types of fields.
const (
	Proto Type = iota // a protocol: present or absent
	Bool              // one bit
	Uint              // a number of up to 32 bits
	MAC               // a link-layer address
	IPv4              // an address, compared with addresses, prefixes, ranges and lists
	IPv6
	IP    // of either family
	Bytes // a run of bytes
	Name  // a text with equality only: a SIP method, a domain name
)

// ID identifies a field. A field with several values lists their IDs in Of.
type ID uint8

// The fields. IDs ending in 0 and 1 are the occurrences of one field.
const (
	_ ID = iota
	Eth
	EthDst
	EthSrc
	EthAddr
	EthType
	Vlan
	VlanID
	VlanPriority
	VlanDEI
	VlanEtype
	VlanID0
	VlanID1
	VlanPriority0
	VlanPriority1
	VlanDEI0
	VlanDEI1
	VlanEtype0
	VlanEtype1
	IP4
	IP4Version
	IP4HdrLen
	IP4DSCP
	IP4ECN
	IP4Len
	IP4ID
	IP4DF
	IP4MF
	IP4FragOffset
	IP4TTL
	IP4Proto
	IP4Checksum
	IP4Src
	IP4Dst
	IP4Addr
	IP6
	IP6DSCP
	IP6ECN
	IP6Flow
	IP6Plen
	IP6Next
	IP6Hlim
	IP6Src
	IP6Dst
	IP6Addr
	IP6HopOpts
	IP6DstOpts
	IP6Routing
	IP6Frag
	IP6FragOffset
	IP6FragMore
	NetSrc
	NetDst
	NetAddr
	NetSrcPort
	NetDstPort
	NetPort
	TCP
	TCPSrcPort
	TCPDstPort
	TCPPort
	TCPSeq
	TCPAck
	TCPHdrLen
	TCPFlags
	TCPFin
	TCPSyn
	TCPReset
	TCPPush
	TCPAckFlag
	TCPUrg
	TCPEce
	TCPCwr
	TCPWindow
	TCPChecksum
	TCPUrgent
	TCPLen
	TCPMSS
	TCPWScale
	TCPSackPerm
	TCPTSVal
	TCPTSEcr
	UDP
	UDPSrcPort
	UDPDstPort
	UDPPort
	UDPLength
	UDPChecksum
	ICMP
	ICMPType
	ICMPCode
	ICMPChecksum
	ICMPIdent
	ICMPSeq
	ICMP6
	ICMP6Type
	ICMP6Code
	ICMP6Checksum
	GRE
	GREFlags
	GREProto
	GREKey
	Payload
	SIPMethod
	DNSName
	DNSType
	TransportUnreadable
	lastField
)

// Field describes a field of the language.
type Field struct {
	ID      ID
	Name    string // canonical name: Wireshark's where one exists
	Aliases []string
	Type    Type
	Bits    int  // of a number
	Hex     bool // prints in hexadecimal
	Of      []ID // the single-valued fields of a field with several values
	Link    bool // belongs to the link layer, invisible to sockets and netfilter
	Doc     string
}

var fields = []Field{
	{ID: Eth, Name: "eth", Type: Proto, Link: true, Doc: "an Ethernet header"},
	{ID: EthDst, Name: "eth.dst", Type: MAC, Link: true},
	{ID: EthSrc, Name: "eth.src", Type: MAC, Link: true},
	{ID: EthAddr, Name: "eth.addr", Type: MAC, Link: true, Of: []ID{EthDst, EthSrc}, Doc: "either address"},
	{ID: EthType, Name: "eth.type", Type: Uint, Bits: 16, Hex: true, Link: true, Doc: "the type after the addresses; in a tagged frame, the tag's type"},
	{ID: Vlan, Name: "vlan", Type: Proto, Link: true, Doc: "at least one VLAN tag"},
	{ID: VlanID, Name: "vlan.id", Type: Uint, Bits: 12, Link: true, Of: []ID{VlanID0, VlanID1}, Doc: "of either of two stacked tags"},
	{ID: VlanPriority, Name: "vlan.priority", Type: Uint, Bits: 3, Link: true, Of: []ID{VlanPriority0, VlanPriority1}},
	{ID: VlanDEI, Name: "vlan.dei", Type: Bool, Link: true, Of: []ID{VlanDEI0, VlanDEI1}},
	{ID: VlanEtype, Name: "vlan.etype", Type: Uint, Bits: 16, Hex: true, Link: true, Of: []ID{VlanEtype0, VlanEtype1}, Doc: "the type after a tag"},
	{ID: VlanID0, Type: Uint, Bits: 12, Link: true}, {ID: VlanID1, Type: Uint, Bits: 12, Link: true},
	{ID: VlanPriority0, Type: Uint, Bits: 3, Link: true}, {ID: VlanPriority1, Type: Uint, Bits: 3, Link: true},
	{ID: VlanDEI0, Type: Bool, Bits: 1, Link: true}, {ID: VlanDEI1, Type: Bool, Bits: 1, Link: true},
	{ID: VlanEtype0, Type: Uint, Bits: 16, Link: true}, {ID: VlanEtype1, Type: Uint, Bits: 16, Link: true},

	{ID: IP4, Name: "ip", Type: Proto, Doc: "an IPv4 header"},
	{ID: IP4Version, Name: "ip.version", Type: Uint, Bits: 4},
	{ID: IP4HdrLen, Name: "ip.hdr_len", Type: Uint, Bits: 6, Doc: "bytes"},
	{ID: IP4DSCP, Name: "ip.dsfield.dscp", Type: Uint, Bits: 6},
	{ID: IP4ECN, Name: "ip.dsfield.ecn", Type: Uint, Bits: 2},
	{ID: IP4Len, Name: "ip.len", Type: Uint, Bits: 16, Doc: "the total length, bytes"},
	{ID: IP4ID, Name: "ip.id", Type: Uint, Bits: 16, Hex: true},
	{ID: IP4DF, Name: "ip.flags.df", Type: Bool},
	{ID: IP4MF, Name: "ip.flags.mf", Type: Bool},
	{ID: IP4FragOffset, Name: "ip.frag_offset", Type: Uint, Bits: 16, Doc: "bytes"},
	{ID: IP4TTL, Name: "ip.ttl", Type: Uint, Bits: 8},
	{ID: IP4Proto, Name: "ip.proto", Type: Uint, Bits: 8},
	{ID: IP4Checksum, Name: "ip.checksum", Type: Uint, Bits: 16, Hex: true},
	{ID: IP4Src, Name: "ip.src", Type: IPv4},
	{ID: IP4Dst, Name: "ip.dst", Type: IPv4},
	{ID: IP4Addr, Name: "ip.addr", Type: IPv4, Of: []ID{IP4Src, IP4Dst}, Doc: "either address"},

	{ID: IP6, Name: "ipv6", Aliases: []string{"ip6"}, Type: Proto, Doc: "an IPv6 header"},
	{ID: IP6DSCP, Name: "ipv6.tclass.dscp", Aliases: []string{"ip6.tclass.dscp"}, Type: Uint, Bits: 6},
	{ID: IP6ECN, Name: "ipv6.tclass.ecn", Aliases: []string{"ip6.tclass.ecn"}, Type: Uint, Bits: 2},
	{ID: IP6Flow, Name: "ipv6.flow", Aliases: []string{"ip6.flow"}, Type: Uint, Bits: 20, Hex: true},
	{ID: IP6Plen, Name: "ipv6.plen", Aliases: []string{"ip6.plen"}, Type: Uint, Bits: 16, Doc: "the payload length, bytes"},
	{ID: IP6Next, Name: "ipv6.nxt", Aliases: []string{"ip6.nxt"}, Type: Uint, Bits: 8, Doc: "the next header of the fixed header"},
	{ID: IP6Hlim, Name: "ipv6.hlim", Aliases: []string{"ip6.hlim"}, Type: Uint, Bits: 8},
	{ID: IP6Src, Name: "ipv6.src", Aliases: []string{"ip6.src"}, Type: IPv6},
	{ID: IP6Dst, Name: "ipv6.dst", Aliases: []string{"ip6.dst"}, Type: IPv6},
	{ID: IP6Addr, Name: "ipv6.addr", Aliases: []string{"ip6.addr"}, Type: IPv6, Of: []ID{IP6Src, IP6Dst}, Doc: "either address"},
	{ID: IP6HopOpts, Name: "ipv6.hopopts", Aliases: []string{"ip6.hopopts"}, Type: Proto, Doc: "a hop-by-hop options header"},
	{ID: IP6DstOpts, Name: "ipv6.dstopts", Aliases: []string{"ip6.dstopts"}, Type: Proto, Doc: "a destination options header"},
	{ID: IP6Routing, Name: "ipv6.routing", Aliases: []string{"ip6.routing"}, Type: Proto, Doc: "a routing header"},
	{ID: IP6Frag, Name: "ipv6.fraghdr", Aliases: []string{"ip6.fraghdr"}, Type: Proto, Doc: "a fragment header"},
	{ID: IP6FragOffset, Name: "ipv6.fraghdr.offset", Aliases: []string{"ip6.fraghdr.offset"}, Type: Uint, Bits: 13, Doc: "units of 8 bytes, as Wireshark has it"},
	{ID: IP6FragMore, Name: "ipv6.fraghdr.more", Aliases: []string{"ip6.fraghdr.more"}, Type: Bool},

	{ID: NetSrc, Name: "net.src", Type: IP, Of: []ID{IP4Src, IP6Src}, Doc: "the source address, IPv4 or IPv6"},
	{ID: NetDst, Name: "net.dst", Type: IP, Of: []ID{IP4Dst, IP6Dst}},
	{ID: NetAddr, Name: "net.addr", Type: IP, Of: []ID{IP4Src, IP4Dst, IP6Src, IP6Dst}, Doc: "either address, IPv4 or IPv6"},
	{ID: NetSrcPort, Name: "net.srcport", Type: Uint, Bits: 16, Of: []ID{TCPSrcPort, UDPSrcPort}, Doc: "TCP's or UDP's"},
	{ID: NetDstPort, Name: "net.dstport", Type: Uint, Bits: 16, Of: []ID{TCPDstPort, UDPDstPort}},
	{ID: NetPort, Name: "net.port", Type: Uint, Bits: 16, Of: []ID{TCPSrcPort, TCPDstPort, UDPSrcPort, UDPDstPort}},

	{ID: TCP, Name: "tcp", Type: Proto, Doc: "a complete TCP header, options excluded"},
	{ID: TCPSrcPort, Name: "tcp.srcport", Type: Uint, Bits: 16},
	{ID: TCPDstPort, Name: "tcp.dstport", Type: Uint, Bits: 16},
	{ID: TCPPort, Name: "tcp.port", Type: Uint, Bits: 16, Of: []ID{TCPSrcPort, TCPDstPort}, Doc: "either port"},
	{ID: TCPSeq, Name: "tcp.seq_raw", Aliases: []string{"tcp.seq"}, Type: Uint, Bits: 32},
	{ID: TCPAck, Name: "tcp.ack_raw", Aliases: []string{"tcp.ack"}, Type: Uint, Bits: 32},
	{ID: TCPHdrLen, Name: "tcp.hdr_len", Type: Uint, Bits: 6, Doc: "bytes"},
	{ID: TCPFlags, Name: "tcp.flags", Type: Uint, Bits: 12, Hex: true},
	{ID: TCPFin, Name: "tcp.flags.fin", Type: Bool},
	{ID: TCPSyn, Name: "tcp.flags.syn", Type: Bool},
	{ID: TCPReset, Name: "tcp.flags.reset", Aliases: []string{"tcp.flags.rst"}, Type: Bool},
	{ID: TCPPush, Name: "tcp.flags.push", Aliases: []string{"tcp.flags.psh"}, Type: Bool},
	{ID: TCPAckFlag, Name: "tcp.flags.ack", Type: Bool},
	{ID: TCPUrg, Name: "tcp.flags.urg", Type: Bool},
	{ID: TCPEce, Name: "tcp.flags.ece", Type: Bool},
	{ID: TCPCwr, Name: "tcp.flags.cwr", Type: Bool},
	{ID: TCPWindow, Name: "tcp.window_size_value", Aliases: []string{"tcp.window"}, Type: Uint, Bits: 16},
	{ID: TCPChecksum, Name: "tcp.checksum", Type: Uint, Bits: 16, Hex: true},
	{ID: TCPUrgent, Name: "tcp.urgent_pointer", Type: Uint, Bits: 16},
	{ID: TCPLen, Name: "tcp.len", Type: Uint, Bits: 17, Doc: "bytes of payload"},
	{ID: TCPMSS, Name: "tcp.options.mss_val", Aliases: []string{"tcp.options.mss"}, Type: Uint, Bits: 16},
	{ID: TCPWScale, Name: "tcp.options.wscale.shift", Aliases: []string{"tcp.options.wscale"}, Type: Uint, Bits: 8},
	{ID: TCPSackPerm, Name: "tcp.options.sack_perm", Type: Proto, Doc: "the option is present"},
	{ID: TCPTSVal, Name: "tcp.options.timestamp.tsval", Type: Uint, Bits: 32},
	{ID: TCPTSEcr, Name: "tcp.options.timestamp.tsecr", Type: Uint, Bits: 32},

	{ID: UDP, Name: "udp", Type: Proto, Doc: "a complete UDP header"},
	{ID: UDPSrcPort, Name: "udp.srcport", Type: Uint, Bits: 16},
	{ID: UDPDstPort, Name: "udp.dstport", Type: Uint, Bits: 16},
	{ID: UDPPort, Name: "udp.port", Type: Uint, Bits: 16, Of: []ID{UDPSrcPort, UDPDstPort}, Doc: "either port"},
	{ID: UDPLength, Name: "udp.length", Type: Uint, Bits: 16, Doc: "the length in the header, bytes"},
	{ID: UDPChecksum, Name: "udp.checksum", Type: Uint, Bits: 16, Hex: true},

	{ID: ICMP, Name: "icmp", Type: Proto, Doc: "8 bytes of ICMP for IPv4"},
	{ID: ICMPType, Name: "icmp.type", Type: Uint, Bits: 8},
	{ID: ICMPCode, Name: "icmp.code", Type: Uint, Bits: 8},
	{ID: ICMPChecksum, Name: "icmp.checksum", Type: Uint, Bits: 16, Hex: true},
	{ID: ICMPIdent, Name: "icmp.ident", Type: Uint, Bits: 16, Hex: true, Doc: "bytes 4 and 5, for any type"},
	{ID: ICMPSeq, Name: "icmp.seq", Type: Uint, Bits: 16, Doc: "bytes 6 and 7, for any type"},
	{ID: ICMP6, Name: "icmpv6", Aliases: []string{"icmp6"}, Type: Proto, Doc: "8 bytes of ICMPv6"},
	{ID: ICMP6Type, Name: "icmpv6.type", Aliases: []string{"icmp6.type"}, Type: Uint, Bits: 8},
	{ID: ICMP6Code, Name: "icmpv6.code", Aliases: []string{"icmp6.code"}, Type: Uint, Bits: 8},
	{ID: ICMP6Checksum, Name: "icmpv6.checksum", Aliases: []string{"icmp6.checksum"}, Type: Uint, Bits: 16, Hex: true},

	{ID: GRE, Name: "gre", Type: Proto, Doc: "4 bytes of GRE"},
	{ID: GREFlags, Name: "gre.flags_and_version", Aliases: []string{"gre.flags"}, Type: Uint, Bits: 16, Hex: true},
	{ID: GREProto, Name: "gre.proto", Type: Uint, Bits: 16, Hex: true},
	{ID: GREKey, Name: "gre.key", Type: Uint, Bits: 32, Hex: true},

	{ID: Payload, Name: "payload", Type: Bytes, Doc: "the bytes after a TCP, UDP, ICMP or ICMPv6 header, to the end of the IP packet or UDP datagram"},
	{ID: SIPMethod, Name: "sip.method", Aliases: []string{"sip.Method"}, Type: Name, Doc: "the capitals before the first space of a TCP or UDP payload"},
	{ID: DNSName, Name: "dns.qname", Aliases: []string{"dns.qry.name"}, Type: Name, Doc: "the first question's, in a UDP payload"},
	{ID: DNSType, Name: "dns.qtype", Aliases: []string{"dns.qry.type"}, Type: Uint, Bits: 16},

	{ID: TransportUnreadable, Name: "transport.unreadable", Type: Proto, Doc: "the transport header is incomplete, or after too many IPv6 extension headers"},
}

var (
	byID    [lastField]*Field
	byName  = map[string]*Field{}
	allName []string // without aliases, for suggestions and docs
)

func init() {
	for i := range fields {
		f := &fields[i]
		if f.Type == Bool {
			f.Bits = 1
		}
		byID[f.ID] = f
		if f.Name == "" {
			continue
		}
		allName = append(allName, f.Name)
		for _, n := range append([]string{f.Name}, f.Aliases...) {
			byName[n] = f
		}
	}
}

// Lookup returns a field by its ID, or nil.
func Lookup(id ID) *Field {
	if int(id) >= len(byID) {
		return nil
	}
	return byID[id]
}

// Fields returns all fields with a name, in the order of the layers.
func Fields() []Field {
	var out []Field
	for _, f := range fields {
		if f.Name != "" {
			out = append(out, f)
		}
	}
	return out
}

// Each returns the single-valued fields of f: f itself, or the fields in Of.
func (f *Field) Each() []ID {
	if len(f.Of) > 0 {
		return f.Of
	}
	return []ID{f.ID}
}

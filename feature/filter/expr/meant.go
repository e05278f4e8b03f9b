// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/internal/suggest"
)

// Names of protocols and fields in nft, iptables, tcpdump and RFCs, with their names here. The
// first existing field of the protocol is suggested. Case and separators are ignored.
var (
	foreignProtos = map[string]string{"ether": "eth", "ethernet": "eth", "mac": "eth", "ip4": "ip", "ipv4": "ip", "iph": "ip", "inet": "ip", "inet6": "ipv6", "ip6": "ipv6", "ip6h": "ipv6",
		"th": "net", "tcph": "tcp", "udph": "udp", "icmp4": "icmp", "icmpv4": "icmp", "icmp6": "icmpv6", "dot1q": "vlan", "8021q": "vlan"}
	foreignFields = map[string][]string{
		"dport": {"dstport"}, "dpt": {"dstport"}, "dstp": {"dstport"}, "destport": {"dstport"}, "destinationport": {"dstport"}, "dstport": {"dstport"},
		"sport": {"srcport"}, "spt": {"srcport"}, "srcp": {"srcport"}, "sourceport": {"srcport"}, "srcport": {"srcport"},
		"dst": {"dst", "dstport"}, "dest": {"dst", "dstport"}, "destination": {"dst", "dstport"},
		"src": {"src", "srcport"}, "source": {"src", "srcport"},
		"daddr": {"dst"}, "dstaddr": {"dst"}, "dstip": {"dst"}, "dip": {"dst"}, "dsthost": {"dst"}, "destinationaddress": {"dst"}, "dmac": {"dst"}, "dstmac": {"dst"},
		"saddr": {"src"}, "srcaddr": {"src"}, "srcip": {"src"}, "sip": {"src"}, "srchost": {"src"}, "sourceaddress": {"src"}, "smac": {"src"}, "srcmac": {"src"},
		"dscp": {"dsfield.dscp", "tclass.dscp"}, "ecn": {"dsfield.ecn", "tclass.ecn"},
		"ttl": {"ttl", "hlim"}, "hoplimit": {"hlim", "ttl"}, "hl": {"hlim", "ttl"}, "hops": {"hlim", "ttl"}, "hlim": {"hlim", "ttl"},
		"protocol": {"proto", "nxt", "type"}, "proto": {"proto", "nxt", "type"}, "nexthdr": {"nxt", "proto"}, "nextheader": {"nxt", "proto"}, "nh": {"nxt", "proto"},
		"flowlabel": {"flow"}, "length": {"len", "plen", "length"}, "totallength": {"len"}, "totlen": {"len"}, "payloadlength": {"plen"}, "len": {"plen", "length"},
		"hdrlength": {"hdr_len"}, "ihl": {"hdr_len"}, "doff": {"hdr_len"}, "headerlength": {"hdr_len"}, "headerlen": {"hdr_len"}, "dataoffset": {"hdr_len"},
		"fragoff": {"frag_offset", "fraghdr.offset"}, "offset": {"frag_offset", "fraghdr.offset"}, "fragoffset": {"fraghdr.offset"}, "frag": {"fraghdr"}, "fragment": {"fraghdr"}, "morefragments": {"flags.mf", "fraghdr.more"},
		"df": {"flags.df"}, "mf": {"flags.mf", "fraghdr.more"}, "hbh": {"hopopts"}, "hopbyhop": {"hopopts"}, "rt": {"routing"},
		"csum": {"checksum"}, "cksum": {"checksum"}, "chksum": {"checksum"}, "check": {"checksum"},
		"sequence": {"seq_raw", "seq"}, "seqno": {"seq_raw", "seq"}, "ackseq": {"ack_raw"}, "ackno": {"ack_raw"}, "urgptr": {"urgent_pointer"}, "win": {"window_size_value"},
		"syn": {"flags.syn"}, "fin": {"flags.fin"}, "rst": {"flags.reset"}, "reset": {"flags.reset"}, "psh": {"flags.push"}, "push": {"flags.push"}, "urg": {"flags.urg"}, "ece": {"flags.ece"}, "cwr": {"flags.cwr"},
		"mss": {"options.mss_val"}, "maxseg": {"options.mss_val"}, "wscale": {"options.wscale.shift"}, "tsval": {"options.timestamp.tsval"}, "tsecr": {"options.timestamp.tsecr"}, "sackperm": {"options.sack_perm"},
		"id": {"ident"}, "identifier": {"ident"}, "vid": {"id"}, "tag": {"id"}, "vlan": {"id"}, "pcp": {"priority"}, "prio": {"priority"}, "cfi": {"dei"}, "type": {"etype"}, "ethertype": {"type", "etype"}, "query": {"qname"}, "name": {"qname"},
	}
)

var between = strings.NewReplacer("_", "", "-", "", ".", "")

// meant returns the field for another tool's name, or "".
func meant(name string) string {
	proto, rest, dotted := strings.Cut(strings.ToLower(name), ".")
	if !dotted {
		proto, rest = "net", proto
	}
	if p, ok := foreignProtos[proto]; ok {
		proto = p
	}
	protos := []string{proto}
	switch {
	case !dotted:
		protos = []string{"net", "ip", "tcp"}
	case slices.Contains([]string{"ip", "ipv6", "tcp", "udp"}, proto):
		protos = []string{proto, "net"} // TCP's addresses are IP's, and IP's ports are TCP's or UDP's
	}
	wanted := foreignFields[between.Replace(rest)]
	if dotted {
		wanted = append([]string{rest}, wanted...)
	}
	for _, p := range protos {
		for _, w := range wanted {
			if f := byName[p+"."+w]; f != nil {
				return f.Name
			}
		}
	}
	return ""
}

// nearest returns the closest field or function for a misspelled name. It excludes fields of both
// directions, like udp.port, unless the name begins alike: dport means one direction.
func nearest(name string) string {
	names := append([]string{"rate", "len"}, allName...)
	for _, f := range fields {
		names = append(names, f.Aliases...)
	}
	_, rest, _ := strings.Cut(name, ".")
	names = slices.DeleteFunc(names, func(n string) bool {
		f := byName[n]
		if f == nil || len(f.Of) == 0 || rest == "" {
			return false
		}
		_, last, _ := strings.Cut(n, ".")
		return !strings.EqualFold(last[:1], rest[:1])
	})
	found := suggest.Nearest(name, names)
	if f := byName[found]; f != nil && strings.EqualFold(f.Name, name) {
		return f.Name
	}
	return found
}

// Numbers of well-known value names.
var (
	protoNumbers = map[string]uint64{"icmp": 1, "igmp": 2, "ipip": 4, "ipv4": 4, "tcp": 6, "udp": 17, "ipv6": 41, "gre": 47, "esp": 50, "ah": 51, "icmpv6": 58, "icmp6": 58, "ipv6-icmp": 58,
		"ospf": 89, "pim": 103, "vrrp": 112, "l2tp": 115, "sctp": 132, "udplite": 136}
	etherNumbers = map[string]uint64{"ip": 0x0800, "ipv4": 0x0800, "ip4": 0x0800, "arp": 0x0806, "ipv6": 0x86dd, "ip6": 0x86dd, "vlan": 0x8100, "8021q": 0x8100, "8021ad": 0x88a8, "mpls": 0x8847,
		"pppoe": 0x8864, "lldp": 0x88cc}
	portNumbers = map[string]uint64{"ssh": 22, "telnet": 23, "smtp": 25, "dns": 53, "domain": 53, "dhcp": 67, "tftp": 69, "http": 80, "ntp": 123, "snmp": 161, "bgp": 179, "ldap": 389, "https": 443, "syslog": 514,
		"dhcpv6": 547, "quic": 443, "sip": 5060, "mdns": 5353, "ipfix": 4739, "netflow": 2055, "sflow": 6343}
	typeNumbers  = map[string]uint64{"echo-reply": 0, "destination-unreachable": 3, "redirect": 5, "echo-request": 8, "time-exceeded": 11}
	type6Numbers = map[string]uint64{"destination-unreachable": 1, "packet-too-big": 2, "time-exceeded": 3, "echo-request": 128, "echo-reply": 129, "nd-router-solicit": 133, "nd-router-advert": 134,
		"nd-neighbor-solicit": 135, "nd-neighbor-advert": 136}
)

// fieldNumber returns the number of a value name for a field, or "". hint names an alternative.
func fieldNumber(name string, x Operand) (number, hint string) {
	var of map[string]uint64
	name, format := strings.ToLower(name), "%d"
	switch x.Field.ID {
	case IP4Proto, IP6Next:
		of = protoNumbers
	case EthType, VlanEtype, GREProto:
		of, format = etherNumbers, "0x%04x"
	case NetPort, NetSrcPort, NetDstPort, TCPPort, TCPSrcPort, TCPDstPort, UDPPort, UDPSrcPort, UDPDstPort:
		of = portNumbers
	case ICMPType:
		of = typeNumbers
	case ICMP6Type:
		of = type6Numbers
	case TCPFlags:
		for _, f := range []string{"tcp.flags." + name, meant("tcp." + name)} {
			if g := byName[f]; g != nil && g.Type == Bool {
				return "", "; there is " + g.Name
			}
		}
	}
	n, ok := of[name]
	if !ok {
		return "", ""
	}
	number = fmt.Sprintf(format, n)
	if f := byName[name]; f != nil && f.Type == Proto {
		hint = fmt.Sprintf("; the field %s alone matches its header", f.Name)
	}
	return number, hint
}

// suggestFields names fields of a protocol for comparisons, because the protocol itself has no
// value.
func suggestFields(f *Field) string {
	var all []string
	for _, last := range []string{"src", "dst", "srcport", "dstport", "type", "proto", "nxt", "offset", "id"} {
		if g := byName[f.Name+"."+last]; g != nil && (last != "id" || len(all) == 0) {
			all = append(all, g.Name)
		}
	}
	switch len(all) {
	case 0:
		return ""
	case 1:
		return "; there is " + all[0]
	}
	return "; there are " + strings.Join(all[:len(all)-1], ", ") + " and " + all[len(all)-1]
}

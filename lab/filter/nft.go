// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"fmt"
	"net/netip"
	"strings"
)

// unrelated is a rule without a matching packet in the measurements.
type unrelated struct {
	src  netip.Addr
	port uint16
}

// unrelatedRules returns n different rules: hosts of 172.16.0.0/12, each with a port.
func unrelatedRules(n int) []unrelated {
	out := make([]unrelated, n)
	for i := range out {
		out[i] = unrelated{netip.AddrFrom4([4]byte{172, 16 + byte(i>>16), byte(i >> 8), byte(i)}), uint16(1024 + i)}
	}
	return out
}

// The rules in both languages. All of them count, like each of weir's rules.
func (u unrelated) weir() string {
	return fmt.Sprintf("ip.src == %s and udp.dstport == %d", u.src, u.port)
}
func (u unrelated) nft() string {
	return fmt.Sprintf("ip saddr %s udp dport %d counter drop", u.src, u.port)
}

// chain returns a table of nftables with one chain, before routing.
func chain(name string, priority int, policy string, rules ...string) string {
	return fmt.Sprintf("table ip %s {\n chain c {\n  type filter hook prerouting priority %d; policy %s;\n  %s\n }\n}\n",
		name, priority, policy, strings.Join(rules, "\n  "))
}

// ending drops every passed packet, to exclude the rest of its path from the measurement.
var ending = chain("lab_end", 300, "drop")

// nftRules returns unrelated rules as rules. nftMap returns them as a verdict map with one lookup and no
// counters.
func nftRules(rules []unrelated) string {
	var out []string
	for _, u := range rules {
		out = append(out, u.nft())
	}
	return chain("lab", 0, "accept", out...)
}

func nftMap(rules []unrelated) string {
	var out []string
	for _, u := range rules {
		out = append(out, fmt.Sprintf("%s . %d : drop", u.src, u.port))
	}
	return chain("lab", 0, "accept", "ip saddr . udp dport vmap {"+strings.Join(out, ", ")+"}")
}

// SPDX-License-Identifier: Apache-2.0

package links

import "strings"

// WaysLeft tells whether packets of a link that is down have a way left. The data path (rescue in protect.bpf.c)
// drops a packet if all repairs for its IP version are down too. Without any such repair the packet stays on the
// link.
type WaysLeft struct {
	Reasons Reason // against the link and the links of its repairs

	repairs, usable [len(versions)]bool // by IP version: a repair exists; a usable one exists
}

var versions = [...]string{"IPv4", "IPv6"}

// Add adds a repair with its IP versions and the reasons against its link.
func (l *WaysLeft) Add(v4, v6 bool, against Reason) {
	for i, suits := range [...]bool{v4, v6} {
		l.repairs[i] = l.repairs[i] || suits
		l.usable[i] = l.usable[i] || suits && against == 0
	}
	l.Reasons |= against
}

// Dropped returns the IP versions of dropped packets, or nil.
func (l *WaysLeft) Dropped() (out []string) {
	for i, name := range versions {
		if l.repairs[i] && !l.usable[i] {
			out = append(out, name)
		}
	}
	return out
}

// Remedy explains how packets get a way again, or returns "" if they have one.
func (l *WaysLeft) Remedy() string {
	if len(l.Dropped()) == 0 {
		return ""
	}
	var out []string
	if l.Reasons&Probe != 0 {
		out = append(out, "check for a firewall at either end dropping BFD (udp/3784, udp/3785) or probes: if the links work, weir apply --allow-outage of a file without their bfd and probe puts them back into use")
	}
	if l.Reasons&Drain != 0 {
		out = append(out, "weir reroute undrain puts drained links back into use")
	}
	if l.Reasons&Carrier != 0 {
		out = append(out, "connect the cable of links without a carrier, or use ip link set up")
	}
	return strings.Join(out, "; ")
}

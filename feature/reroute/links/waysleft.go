// SPDX-License-Identifier: Apache-2.0

package links

import "strings"

// WaysLeft tells whether packets of a link that is down have a way left. The data path (rescue in protect.bpf.c) drops a packet if
// some repairs are for its version of IP and all of their links are down too. Without any such repair the packet stays on the link.
type WaysLeft struct {
	Reasons Reason // against the link, and against links of its repairs

	repairs, usable [len(versions)]bool // by version of IP: whether there is a repair, and one that may be used
}

var versions = [...]string{"IPv4", "IPv6"}

// Add adds a repair: for which versions of IP it is, and the reasons against its link.
func (l *WaysLeft) Add(v4, v6 bool, against Reason) {
	for i, suits := range [...]bool{v4, v6} {
		l.repairs[i] = l.repairs[i] || suits
		l.usable[i] = l.usable[i] || suits && against == 0
	}
	l.Reasons |= against
}

// Dropped returns the versions of IP whose packets are dropped; nil: none are.
func (l *WaysLeft) Dropped() (out []string) {
	for i, name := range versions {
		if l.repairs[i] && !l.usable[i] {
			out = append(out, name)
		}
	}
	return out
}

// Remedy says how packets get a way again; "": they have one.
func (l *WaysLeft) Remedy() string {
	if len(l.Dropped()) == 0 {
		return ""
	}
	var out []string
	if l.Reasons&Probe != 0 {
		out = append(out, "see whether a firewall at either end drops BFD (udp/3784, udp/3785) or probes: where the links do work, weir apply --allow-outage of a file without their bfd and probe uses them again")
	}
	if l.Reasons&Drain != 0 {
		out = append(out, "weir reroute undrain lets drained links be used")
	}
	if l.Reasons&Carrier != 0 {
		out = append(out, "links without a carrier need a cable, or ip link set up")
	}
	return strings.Join(out, "; ")
}

// SPDX-License-Identifier: Apache-2.0

// Package forwarding checks the kernel settings and firewall rules that let a load balancer's host forward the answers
// of backends. The BPF program forwards clients' packets, but the kernel forwards answers.
package forwarding

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/conntrack"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
)

// Findings checks the calling thread's network namespace for weir doctor.
func Findings(c *spec.Config) (out []feature.Finding) {
	found := func(text, remedy string) {
		out = append(out, feature.Finding{Object: "load balancer " + c.Name, Text: text, Remedy: remedy})
	}
	var v4, v6 bool
	var addresses []netip.Addr
	for _, s := range c.Services {
		for _, l := range s.Listen {
			v4 = v4 || l.Prefix.Addr().Is4()
			v6 = v6 || l.Prefix.Addr().Is6()
			if !slices.Contains(addresses, l.Prefix.Addr()) {
				addresses = append(addresses, l.Prefix.Addr())
			}
		}
	}
	if v4 {
		if off := slices.DeleteFunc(slices.Clone(c.Devices), func(d string) bool { return sysctl("ipv4/conf/"+d+"/forwarding") != "0" }); len(off) > 0 {
			found(fmt.Sprintf("this host does not forward IPv4 packets from %s: answers of backends are dropped", strings.Join(off, ", ")), "sysctl -w net.ipv4.ip_forward=1")
		}
		strict := slices.DeleteFunc(slices.Clone(c.Devices), func(d string) bool {
			all, own := sysctl("ipv4/conf/all/rp_filter"), sysctl("ipv4/conf/"+d+"/rp_filter")
			return own == "" || max(all, own) != "1"
		})
		if len(strict) > 0 {
			found(fmt.Sprintf("rp_filter is 1 at %s: answers of backends are dropped, unless the route to the services' addresses leaves by their interface", strings.Join(strict, ", ")),
				"sysctl -w net.ipv4.conf.all.rp_filter=2: it overrides 1 at an interface")
		}
	}
	if v6 && sysctl("ipv6/conf/all/forwarding") == "0" {
		found("this host does not forward IPv6 packets: answers of backends are dropped", "sysctl -w net.ipv6.conf.all.forwarding=1")
	}
	drops, err := conntrack.InvalidDrops([]*nftables.ChainHook{nftables.ChainHookPrerouting, nftables.ChainHookForward, nftables.ChainHookPostrouting}, addresses)
	if err == nil && len(drops) > 0 {
		slices.SortFunc(addresses, netip.Addr.Compare)
		found(fmt.Sprintf("a rule drops packets in conntrack's state invalid (%s): conntrack sees only the answers of backends, so it may drop them, above all those of moved sessions", strings.Join(drops, "; ")),
			fmt.Sprintf("accept the services' answers in an earlier rule of the chain, like ip saddr %s accept, or exempt them by notrack", addresses[0]))
	}
	return out
}

// sysctl reads a setting below net, "" if there is none.
func sysctl(name string) string {
	text, _ := os.ReadFile("/proc/sys/net/" + name)
	return strings.TrimSpace(string(text))
}

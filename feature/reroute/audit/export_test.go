// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/feature/reroute/topo"
)

// ParseBackups formats the parsed backups on a line.
func ParseBackups(text string) (string, error) {
	list, err := parseBackups(text)
	var out []string
	for _, b := range list {
		out = append(out, fmt.Sprintf("%s %v", b.prefix, b.hops))
	}
	return strings.Join(out, "; "), err
}

// InstalledAt names the paths applying to a prefix at the links of routes.
func InstalledAt(links []string, prefix netip.Prefix, paths []protect.PathState) (names []string) {
	var routes []hop
	for _, l := range links {
		routes = append(routes, hop{link: l})
	}
	for _, i := range installed(routes, prefix, paths) {
		names = append(names, i.Path)
	}
	return names
}

// PlannedFor lists the repairs planned for a prefix, by failure and output link.
func PlannedFor(n *topo.Network, a *plan.Answer, prefix netip.Prefix) (out []string) {
	for _, p := range planned(n, a, prefix) {
		out = append(out, p.Failure+": "+p.Out)
	}
	return out
}

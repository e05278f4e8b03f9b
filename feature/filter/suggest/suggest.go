// SPDX-License-Identifier: Apache-2.0

// Package suggest proposes filters for a host.
package suggest

import (
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/inventory"
	"github.com/weir-project/weir/kernel"
)

// For returns a filter that counts the packets of the servers in weir's own namespace.
func For(h inventory.Host) []feature.Suggestion {
	var rules strings.Builder
	for _, p := range h.Programs {
		if p.Local() || p.Netns != "" || slices.Contains([]inventory.Role{inventory.Access, inventory.Routing, inventory.Own}, p.Role) {
			continue
		}
		for _, proto := range []string{"udp", "tcp"} {
			var ports []string
			for _, l := range p.Listens {
				if port := fmt.Sprint(l.Local.Port()); l.Proto == proto && !slices.Contains(ports, port) {
					ports = append(ports, port)
				}
			}
			if len(ports) > 0 {
				fmt.Fprintf(&rules, "      - {name: %s, match: '%s.dstport in {%s}', action: count}\n", feature.Scalar(p.Service+"-"+proto), proto, strings.Join(ports, " "))
			}
		}
	}
	if rules.Len() == 0 {
		return nil
	}
	hook := "netfilter"
	if kernel.NetfilterLink.Check() != nil {
		hook = "nft # netfilter needs Linux " + kernel.NetfilterLink.Since
	}
	return []feature.Suggestion{{Text: "filter:\n  - name: servers\n    hook: " + hook + "\n    at: input\n    rules:\n" + rules.String(),
		Reason: []string{"Count the packets of each server: weir filter list. A rule with action: drop or pass decides.",
			"weir filter test EXPR -r FILE tries an expression on a capture."}}}
}

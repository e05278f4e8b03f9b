// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature/filter/expr"
)

// Fragment fields of IPv4 and IPv6, and payload fields. A fragment has part of the payload or none
// of it.
var (
	fragments4 = []expr.ID{expr.IP4MF, expr.IP4FragOffset}
	fragments6 = []expr.ID{expr.IP6Frag, expr.IP6FragOffset, expr.IP6FragMore}
	inPayload  = []expr.ID{expr.Payload, expr.SIPMethod, expr.DNSName, expr.DNSType}
)

// evaded is a rule evaded by fragments.
type evaded struct {
	rule     int
	ip4, ip6 bool // families of the evading fragments
}

// families reports the address families filtered before reassembly. docs/FILTER-LANGUAGE.md has the
// table.
func (f Filter) families() (ip4, ip6 bool) {
	if f.Hook.ofDevices() {
		return true, true
	}
	switch f.At {
	case "prerouting", "forward":
		return true, true
	case "input":
		return false, true
	}
	return false, false
}

// evadedByFragments returns the first payload rule evaded by fragments, or nil. Fragments do not
// evade a rule if an earlier rule drops them, or if nothing after it passes packets.
func (f Filter) evadedByFragments() *evaded {
	ip4, ip6 := f.families()
	for i, r := range f.Rules {
		rule, err := r.parse()
		if err != nil {
			return nil // reported elsewhere
		}
		var asked []expr.ID
		expr.Walk(rule.Match.Root, func(n expr.Node) {
			for _, x := range expr.Operands(n) {
				asked = append(asked, x.Field.ID)
			}
		})
		asks := func(ids []expr.ID) bool {
			return slices.ContainsFunc(asked, func(id expr.ID) bool { return slices.Contains(ids, id) })
		}
		if !asks(inPayload) {
			if r.Action == Drop {
				ip4, ip6 = ip4 && !asks(fragments4), ip6 && !asks(fragments6)
			}
			continue
		}
		e := &evaded{i, ip4 && !rule.OnlyIPv6(), ip6 && !rule.OnlyIPv4()}
		if r.Action != Count && (e.ip4 || e.ip6) && f.passesBehind(i) {
			return e
		}
	}
	return nil
}

// passesBehind reports whether a later rule or the default passes packets.
func (f Filter) passesBehind(i int) bool {
	return f.Default != Drop || slices.ContainsFunc(f.Rules[i+1:], func(r Rule) bool { return r.Action == Pass })
}

// warning describes the evasion and its remedy.
func (e *evaded) warning(f Filter) string {
	var of, drop []string
	if e.ip4 {
		of, drop = append(of, "IPv4"), append(drop, "ip.flags.mf or ip.frag_offset > 0")
	}
	if e.ip6 {
		of, drop = append(of, "IPv6"), append(drop, "ipv6.fraghdr")
	}
	unless := ""
	if !f.Hook.ofDevices() {
		unless = ", unless conntrack is active in the namespace,"
	}
	return fmt.Sprintf("filter %s, at %s: fragmented %s datagrams are reassembled after it%s and evade the payload match of %s: drop %s before it, or see docs/FILTER.md on fragments",
		f.Name, f.location(), strings.Join(of, " and "), unless, f.ruleName(e.rule), strings.Join(drop, " or "))
}

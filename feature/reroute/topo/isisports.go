// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// isisPort is an adjacency of the router that was asked.
type isisPort struct {
	neighbour, device string
	addresses         []netip.Addr // of the neighbour, link-local ones first
}

var isisInterface = regexp.MustCompile(`^\s+Interface: (\S+), Level: [^,]*(?:, State: (\w+))?`)

// isisPorts reads "show isis neighbor detail", if it is there: a neighbour's name stands on a line of its own above.
func isisPorts(data []byte) (out []isisPort) {
	before, up := "", false
	for text := range strings.Lines(string(data)) {
		if isisLevel.MatchString(text) {
			break
		}
		word := strings.TrimSpace(text)
		if m := isisInterface.FindStringSubmatch(text); m != nil {
			if up = m[2] == "" || m[2] == "Up"; up {
				out = append(out, isisPort{neighbour: before, device: m[1]})
			}
		} else if a, err := netip.ParseAddr(word); err == nil && up {
			out[len(out)-1].addresses = append(out[len(out)-1].addresses, a)
		}
		before = word
	}
	return out
}

// nameInterfaces gives the router's own links their devices, by the neighbour's address, or where one link leads to a
// neighbour, by its name; and the neighbour's IPv6 address, which LSPs have of point-to-point links at best.
func (r *isisReader) nameInterfaces(b *Builder) {
	self, ok := b.byName[b.n.Self]
	if !ok {
		return
	}
	for i := range b.n.Links {
		l := &b.n.Links[i]
		if l.From != self {
			continue
		}
		var named []isisPort
		for _, p := range r.ports {
			if l.Remote.IsValid() && slices.Contains(p.addresses, l.Remote) {
				named = []isisPort{p}
				break
			}
			if r.name(r.systemID(p.neighbour)) == b.n.Nodes[l.To].Name {
				named = append(named, p)
			}
		}
		if len(named) == 1 {
			l.Interface = named[0].device
			i := slices.IndexFunc(named[0].addresses, netip.Addr.Is6)
			if i >= 0 && !l.Remote.Is6() {
				l.Remote = named[0].addresses[i]
			}
		}
	}
}

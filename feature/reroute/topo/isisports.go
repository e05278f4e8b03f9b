// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// isisPort is an adjacency of the queried router.
type isisPort struct {
	neighbour, device string
	addresses         []netip.Addr // of the neighbour, link-local ones first
}

var isisInterface = regexp.MustCompile(`^\s+Interface: (\S+), Level: [^,]*(?:, State: (\w+))?`)

// isisPorts reads the output of "show isis neighbor detail", if present. A neighbour's name is on the line above its
// interface.
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

// nameInterfaces fills in the devices of the router's own links. It matches by the neighbour's address, or by its
// name if only one link leads there. It also fills in the neighbour's IPv6 address, because LSPs have it for
// point-to-point links at best.
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

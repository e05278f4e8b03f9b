// SPDX-License-Identifier: Apache-2.0

package plan

import "fmt"

// When a network changes, routers learn of it at different moments, and while some route as before and others as
// after, packets may circle between them (micro-loops, RFC 5715). Delaying the routers next to the failure (RFC 8333)
// prevents such loops there, not elsewhere. Detours prevent all of them, whatever the order, in two steps:
//
//  1. Each router, as it learns of the change, sends packets for the destinations whose paths change by a detour: its
//     path after the change, as a segment list that does not depend on who has learned of the change, for each of
//     its segments has the same shortest paths before and after.
//  2. When all have, which a timer of some seconds stands for, each goes over to its new routing table.
//
// In step 1 a packet moves along the old paths, which get it nearer at each hop, until a router sends it on a detour,
// which arrives. In step 2 the same holds of the new paths. Routers next to a failure repair packets from the start:
// their repair is their detour.

// Detour is what one router does with packets for one destination during a change.
type Detour struct {
	Destination int
	Out         int       // link over which packets leave
	Segments    []Segment // in order of travel
	Metric      uint64    // of the path after the change
}

// Detours lists those of a router, by destination, for a failure (up is false) or for the return of what had failed (up
// is true; the network is then that with it). Destinations that no path leads to after the change have none, nor have
// those whose paths stay the same; missing are those that have none for want of SIDs.
func (p *Planner) Detours(router int, f Failure, up bool) (detours []Detour, missing []int) {
	g := p.g
	if router == f.Node {
		return nil, nil
	}
	laid := g.lay(f)
	source := int32(router)
	var targets []int32
	for d := range int32(len(g.Nodes)) {
		if d != source && g.dist(source, d) < infinite && !g.safe(source, d, laid) {
			targets = append(targets, d)
		}
	}
	if len(targets) == 0 {
		return nil, nil
	}
	after := g.from(source)
	if !up {
		after = g.without(after, laid)
	}
	s := g.search(after, laid, up, targets)
	for _, d := range targets {
		if after.dist[d] >= infinite {
			continue
		}
		out, segments, ok := s.list(d)
		if !ok {
			missing = append(missing, int(d))
			continue
		}
		detours = append(detours, Detour{int(d), out, segments, after.dist[d]})
	}
	return detours, missing
}

// everywhere lists what can fail in a mode in the whole network, each once.
func (p *Planner) everywhere(mode Mode) (out []Failure) {
	seen := map[string]bool{}
	for l := range p.g.Links {
		f := p.g.newFailure(int32(l), mode)
		if key := fmt.Sprint(f.Links); !seen[key] {
			seen[key] = true
			out = append(out, f)
		}
	}
	return out
}

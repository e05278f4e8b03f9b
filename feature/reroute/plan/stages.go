// SPDX-License-Identifier: Apache-2.0

package plan

import "fmt"

// When a network changes, routers learn of it at different moments. While some route as before and others as after,
// packets may circle between them (micro-loops, RFC 5715). A delay in the routers next to the failure (RFC 8333)
// prevents only loops there. Detours prevent all of them, in any order, in two steps:
//
//	1. Each router, on learning of the change, sends packets for affected destinations by a
//	   detour. It is the path after the change, as a list of segments with equal shortest
//	   paths before and after, so it does not depend on other routers' knowledge.
//	2. After all routers have learned of it (a timer of some seconds), each uses its new
//	   routing table.
//
// In step 1 a packet follows the old paths, getting nearer at each hop, until a router sends it on a detour, and the
// detour arrives. In step 2 the same is true of the new paths. Routers next to a failure repair packets from the
// start: their repair is their detour.

// Detour is one router's handling of packets for one destination during a change.
type Detour struct {
	Destination int
	Out         int       // output link
	Segments    []Segment // in order of travel
	Metric      uint64    // of the path after the change
}

// Detours lists the detours of a router by destination, for a failure (up is false) or for its end. With up, the
// network includes the failed part. Destinations without a path after the change have none, nor have unaffected ones.
// missing lists the destinations without a detour for lack of SIDs.
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

// everywhere lists all possible failures of a mode in the whole network.
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

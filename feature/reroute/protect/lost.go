// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// inherit copies the state of a known link; o may be nil.
func (l *watched) inherit(o *watched) {
	if o != nil {
		l.up, l.seen, l.since, l.alone, l.until, l.lost, l.against = o.up, o.seen, o.since, o.alone, o.until, o.lost, o.against
	}
}

// useKept routes packets by the copies after a link lost its carrier and its routes. A device set down loses the
// copies too.
func (w *watcher) useKept(x *watched, a *netlink.LinkAttrs) {
	if !x.protected {
		return
	}
	x.lost = time.Now().Add(keepTime)
	w.follow()
	if a.RawFlags&unix.IFF_UP == 0 {
		return
	}
	x.until = time.Now().Add(keepTime)
	if err := w.ns.Do(func() error { return addRules(a.Index) }); err != nil {
		w.log.Warn("routes lost with the link are not kept", "interface", x.name, "err", err)
	}
}

// resume continues the use of copies begun by another process.
func (w *watcher) resume() error {
	return w.ns.Do(func() error {
		rules, err := keepRules()
		for index, x := range w.links {
			if len(rules[keepTable(index)]) > 0 && x.until.IsZero() {
				x.until = time.Now().Add(keepTime)
			}
		}
		return err
	})
}

// endKept ends the use of copies for links whose time is over.
func (w *watcher) endKept(at time.Time) {
	for index, x := range w.links {
		if x.until.IsZero() || at.Before(x.until) {
			continue
		}
		if err := w.ns.Do(func() error { return dropRules(index) }); err != nil {
			x.until = at.Add(pollInterval)
			continue
		}
		x.until = time.Time{}
		w.follow()
	}
}

// endAll ends the use of all copies when the process ends. A watcher of another configuration takes them over.
func (w *watcher) endAll(ctx context.Context) {
	if ctx.Err() != nil {
		w.endKept(time.Now().Add(2 * keepTime))
	}
}

// tellLost logs, once per loss, the routes lost with a link, and ends the use of unneeded copies. The kernel removes
// routes up to a second after the loss of the carrier (net/core/link_watch.c). Until the first one is gone, they may
// still be removed.
func (w *watcher) tellLost() error {
	using := false
	for _, x := range w.links {
		using = using || !x.lost.IsZero() || !x.until.IsZero()
	}
	if !using {
		return nil
	}
	var s survey
	err := w.ns.Do(func() (err error) {
		s, err = readRoutes()
		return err
	})
	if err != nil {
		return err
	}
	now := time.Now()
	for index, x := range w.links {
		lost := s.lost(index, x.alone)
		waits := now.Before(x.lost) && len(lost) == 0 && !x.up && s.hasStaleRoute(index)
		if waits {
			w.follow()
		}
		needed := slices.ContainsFunc(lost, func(l lone) bool { return s.copied(index, l) })
		if !waits && !needed && !x.until.IsZero() {
			x.until = now // routes are back
			w.endKept(now)
		}
		if now.Before(x.lost) && len(lost) > 0 {
			w.logLost(x, lost, index, s)
			x.lost = time.Time{}
		}
	}
	return nil
}

// hasStaleRoute reports whether a route with a copy still exists over an interface without a carrier.
func (s survey) hasStaleRoute(index int) bool {
	for k := range s.kept {
		is := s.routes[tablePrefix{unix.RT_TABLE_MAIN, k.to}]
		if k.table == keepTable(index) && is.oif == index && !is.several && !is.plain {
			return true
		}
	}
	return false
}

// lost returns the interface's destinations without any route now, with and without copies. The copies may include
// routes newer than all.
func (s survey) lost(index int, all []lone) (out []lone) {
	seen := map[tablePrefix]int{}
	for k := range s.kept {
		if k.table == keepTable(index) && s.routes[tablePrefix{unix.RT_TABLE_MAIN, k.to}] == (standing{}) {
			seen[tablePrefix{unix.RT_TABLE_MAIN, k.to}] = len(out)
			out = append(out, lone{tablePrefix: tablePrefix{unix.RT_TABLE_MAIN, k.to}, via: k.via, carrier: true})
		}
	}
	for _, l := range all {
		if s.routes[l.tablePrefix] != (standing{}) {
			continue
		}
		if i, copied := seen[l.tablePrefix]; copied {
			out[i].proto = l.proto
		} else {
			out = append(out, l)
		}
	}
	return out
}

// copied reports whether a copy of the route to a destination exists.
func (s survey) copied(index int, l lone) bool {
	return l.table == unix.RT_TABLE_MAIN && s.kept[tableRoute{tablePrefix: tablePrefix{keepTable(index), l.to}, oif: index, via: l.via, proto: keepProtocol, priority: keepMetric}]
}

func (w *watcher) logLost(x *watched, lost []lone, index int, s survey) {
	var by []string
	kept := 0
	for _, l := range lost {
		if name := protocol(l.proto); l.proto != 0 && !slices.Contains(by, name) {
			by = append(by, name)
		}
		if s.copied(index, l) {
			kept++
		}
	}
	args := []any{"interface", x.name, "lost", len(lost), "of", max(len(x.alone), len(lost)), "protocol", strings.Join(by, ","), "rerouted", kept, "for", keepTime}
	if kept < len(lost) {
		refused := destinations(lost, func(l lone) bool { return !s.copied(index, l) })
		args = append(args, "refused", some(refused), "remedy", "set a link down only after the routing protocol has left it; add your own route for destinations lost with the carrier")
	}
	w.log.Warn("routes lost with their link", args...)
}

// protocol returns the name of a route's protocol, as in iproute2's rt_protos.
func protocol(n uint8) string {
	names := map[uint8]string{unix.RTPROT_BOOT: "boot", unix.RTPROT_STATIC: "static", unix.RTPROT_ZEBRA: "zebra", unix.RTPROT_BIRD: "bird", unix.RTPROT_BABEL: "babel",
		unix.RTPROT_BGP: "bgp", unix.RTPROT_ISIS: "isis", unix.RTPROT_OSPF: "ospf", unix.RTPROT_RIP: "rip", unix.RTPROT_EIGRP: "eigrp"}
	if name, ok := names[n]; ok {
		return name
	}
	return fmt.Sprint(n)
}

// RouteState counts the destinations routed over a path's interface alone.
type RouteState struct {
	Alone   int  `json:"alone"`   // all; without a route after the interface is set down
	Carrier int  `json:"carrier"` // the part of Alone lost with the carrier
	Kept    int  `json:"kept"`    // the part of Carrier still rerouted while weir serve runs
	Lost    int  `json:"lost"`    // the part of Kept without any other route now
	InUse   bool `json:"in_use"`  // packets without another route go to the path's interface and are rerouted

	Followed bool `json:"followed"` // weir serve runs
}

// routeState counts the routes of an interface.
func (s survey) routeState(index int, rules map[uint32][]netlink.Rule) (r RouteState) {
	for _, l := range s.alone(index)[index] {
		r.Alone++
		if l.carrier {
			r.Carrier++
		}
	}
	for k := range s.kept {
		if k.table != keepTable(index) {
			continue
		}
		r.Kept++
		if s.routes[tablePrefix{unix.RT_TABLE_MAIN, k.to}] == (standing{}) {
			r.Lost++
		}
	}
	r.InUse = len(rules[keepTable(index)]) > 0
	return r
}

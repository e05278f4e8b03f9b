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

// inherit takes over what was known of a link; nil: nothing.
func (l *watched) inherit(o *watched) {
	if o != nil {
		l.up, l.seen, l.since, l.alone, l.until, l.lost, l.against = o.up, o.seen, o.since, o.alone, o.until, o.lost, o.against
	}
}

// useKept has packets of a link that went down, whose routes went with it, take the copies. A
// device that is set down takes the copies along as well.
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
		w.log.Warn("routes that go with a link are not kept", "interface", x.name, "err", err)
	}
}

// resume goes on with the copies that another process has put in use.
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

// endKept has no packet take the copies of links whose time is over at a moment.
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

// endAll ends that for all links with the process. A watcher that follows another configuration
// goes on with them.
func (w *watcher) endAll(ctx context.Context) {
	if ctx.Err() != nil {
		w.endKept(time.Now().Add(2 * keepTime))
	}
}

// tellLost logs, once for each loss, which routes went with a link. The copies end where none is
// needed any more. The kernel takes routes away up to a second after the carrier is lost
// (net/core/link_watch.c): as long as none has gone they may go yet.
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
			x.until = now // routes are there again
			w.endKept(now)
		}
		if now.Before(x.lost) && len(lost) > 0 {
			w.logLost(x, lost, index, s)
			x.lost = time.Time{}
		}
	}
	return nil
}

// hasStaleRoute says whether a route with a copy is still there, over an interface that lost its carrier.
func (s survey) hasStaleRoute(index int) bool {
	for k := range s.kept {
		is := s.routes[tablePrefix{unix.RT_TABLE_MAIN, k.to}]
		if k.table == keepTable(index) && is.oif == index && !is.several && !is.plain {
			return true
		}
	}
	return false
}

// lost are those of an interface's destinations that have no route any more. It may have copies of later ones as well.
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

// copied says whether weir has a copy of the route to a destination.
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
		args = append(args, "refused", some(refused), "remedy", "set a link down only after the routing protocol has left it; add a route of your own for what goes with the carrier")
	}
	w.log.Warn("routes went with their link", args...)
}

// protocol is the name of a route's protocol, as rt_protos of iproute2 has it.
func protocol(n uint8) string {
	names := map[uint8]string{unix.RTPROT_BOOT: "boot", unix.RTPROT_STATIC: "static", unix.RTPROT_ZEBRA: "zebra", unix.RTPROT_BIRD: "bird", unix.RTPROT_BABEL: "babel",
		unix.RTPROT_BGP: "bgp", unix.RTPROT_ISIS: "isis", unix.RTPROT_OSPF: "ospf", unix.RTPROT_RIP: "rip", unix.RTPROT_EIGRP: "eigrp"}
	if name, ok := names[n]; ok {
		return name
	}
	return fmt.Sprint(n)
}

// RouteState are the destinations that have routes over a path's interface alone, in numbers.
type RouteState struct {
	Alone   int  `json:"alone"`   // all of them: they have no route once it is set down
	Carrier int  `json:"carrier"` // of these, gone with its carrier
	Kept    int  `json:"kept"`    // of these, rerouted all the same while weir serve runs
	Lost    int  `json:"lost"`    // kept ones that have no other route now
	InUse   bool `json:"in_use"`  // packets without another route are sent to the path's interface, and rerouted

	Followed bool `json:"followed"` // weir serve runs
}

// routeState looks at the routes of an interface.
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

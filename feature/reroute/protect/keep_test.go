// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// objects gives r1 routes to d, and to two prefixes behind it, with next-hop objects.
func (w *world) objects() {
	w.Helper()
	w.ip(w.r1, "nexthop add id 6 via fd00:12::2 dev main", "nexthop add id 4 via 10.12.0.2 dev main",
		"route replace fd00:d::/64 nhid 6", "route replace 10.4.0.0/24 nhid 4", "route add fd00:6::/64 nhid 6", "route add fd00:7::/64 nhid 6")
}

// objectsAgain restores the objects after main lost its carrier.
func (w *world) objectsAgain() {
	w.Helper()
	w.ip(w.r1, "nexthop add id 6 via fd00:12::2 dev main", "nexthop add id 4 via 10.12.0.2 dev main",
		"route add fd00:d::/64 nhid 6", "route add 10.4.0.0/24 nhid 4", "route add fd00:6::/64 nhid 6", "route add fd00:7::/64 nhid 6")
}

// out returns r1's output interface for an address.
func (w *world) out(to string) string {
	w.Helper()
	_, after, _ := strings.Cut(w.ip(w.r1, "route get "+to), " dev ")
	dev, _, _ := strings.Cut(after, " ")
	return dev
}

// keptFor sets the time copies are used.
func keptFor(t *testing.T, d time.Duration) {
	was := keepTime
	keepTime = d
	t.Cleanup(func() { keepTime = was })
}

// Packets of routes lost with the carrier are rerouted until the routing protocol has other routes.
func TestKeepsRoutes(t *testing.T) {
	w := newWorld(t)
	before := w.tables()
	keptFor(t, time.Hour)
	w.objects()
	said := strings.Join(w.apply(w.path(around())), "\n")
	if !strings.Contains(said, "10.4.0.0/24, fd00:6::/64, fd00:7::/64 and 1 more: no route is left once interface main loses its carrier") ||
		!strings.Contains(said, "only while weir serve runs; run weir serve") {
		t.Errorf("said %q", said)
	}
	stop := w.serve()
	w.until("the copies are known to be followed", func() bool {
		r := w.state("core").Routes
		return r.Followed && r.Kept == 4 && r.Carrier == 4 && r.Lost == 0 && !r.InUse
	})
	st, err := ReadState(t.Context(), w.root)
	if err != nil {
		t.Fatal(err)
	}
	if v := Vanishing(st); len(v) > 0 {
		t.Errorf("found %+v", v)
	}
	w.ip(w.r1, "route del fd00:7::/64") // withdrawn while the link works
	if w.routed("fd00:7::1") {
		t.Error("a withdrawn prefix has a route")
	}
	w.until("copies follow", func() bool { return w.state("core").Routes.Kept == 3 })
	p6, p4 := w.pair(true), w.pair(false)
	w.ip(w.r2, "link set main down")
	w.until("the copies are used", func() bool { r := w.state("core").Routes; return r.InUse && r.Lost == 3 })
	if !p6.arrives(1000, patience) || !p4.arrives(1000, patience) {
		t.Errorf("a packet did not arrive: %+v", w.state("core"))
	}
	if w.routed("fd00:7::1") || !w.routed("fd00:6::1") {
		t.Error("copies of other routes are used")
	}
	if said := w.apply(w.path(around(), around())); len(said) == 0 { // another configuration
		t.Error("nothing changed")
	}
	if !p6.arrives(1000, patience) || !p4.arrives(1000, patience) {
		t.Errorf("a packet did not arrive with another configuration: %+v", w.state("core"))
	}
	// New routes of the protocol win at once, even a default route.
	w.ip(w.r1, "route add default via fd00:13::3 dev back")
	if got := w.out("fd00:6::1"); got != "back" {
		t.Errorf("a destination with a default route goes to %s", got)
	}
	w.ip(w.r1, "route del default via fd00:13::3 dev back", "route add fd00:d::/64 via fd00:13::3 dev back", "route add fd00:6::/64 via fd00:13::3 dev back",
		"route add 10.4.0.0/24 via inet6 fd00:13::3 dev back")
	w.until("the copies are not used any more", func() bool { return !w.state("core").Routes.InUse })
	if !p6.arrives(1000, patience) || !p4.arrives(1000, patience) {
		t.Errorf("a packet did not arrive by new routes: %+v", w.state("core"))
	}
	stop()
	w.remove()
	w.ip(w.r1, "route del fd00:d::/64", "route del fd00:6::/64", "route del 10.4.0.0/24")
	w.ip(w.r2, "link set main up")
	w.eventually("main is up", func() bool { return strings.Contains(w.ip(w.r1, "-o link show main"), "LOWER_UP") })
	w.ip(w.r1, "route add fd00:d::/64 via fd00:12::2", "route add 10.4.0.0/24 via 10.12.0.2")
	w.eventually("the tables are as before", func() bool { return w.tables() == before })
}

// eventually is until for worlds without a path.
func (w *world) eventually(what string, f func() bool) {
	w.Helper()
	nstest.Eventually(w, func() error {
		if !f() {
			return fmt.Errorf("not yet: %s:\n%s", what, w.tables())
		}
		return nil
	})
}

// A destination without any route is rerouted for KeepTime at most. The copies end with the process too.
func TestKeepsRoutesForSoLong(t *testing.T) {
	w := newWorld(t)
	w.objects()
	w.apply(w.path(around()))
	for ends, limit := range map[string]time.Duration{"time": 300 * time.Millisecond, "process": time.Hour} {
		keptFor(t, limit)
		rules := w.hearRules()
		stop := w.serveNow()
		// The carrier byte may be left from the previous round until the link is found up.
		w.until("the link is in use", func() bool { st := w.state("core"); return st.Routes.Followed && st.Routes.Kept == 4 && !st.Carrier })
		begin := time.Now()
		w.ip(w.r2, "link set main down")
		w.until("the copies are used", func() bool { added, _ := rules(); return added == 2 }) // of both families
		if ends == "process" {
			w.until("all routes are lost", func() bool { r := w.state("core").Routes; return r.InUse && r.Lost == 4 })
			stop()
		}
		w.until(ends+" ends the copies", func() bool { _, removed := rules(); return removed == 2 })
		if after := time.Since(begin); ends == "time" && after < limit {
			t.Errorf("the copies were used for %s, want %s", after, limit)
		}
		if st := w.state("core"); st.Routes.InUse || !st.Carrier {
			t.Errorf("after %s: %+v", ends, st)
		}
		// The kernel may remove the routes after the copies end at 300 ms.
		w.becomes(addrD, false)
		w.becomes(addrD4, false)
		stop()
		w.ip(w.r2, "link set main up")
		w.eventually("main is up", func() bool { return strings.Contains(w.ip(w.r1, "-o link show main"), "LOWER_UP") })
		w.objectsAgain()
	}
}

// hearRules counts rules added and removed at r1 from now on, including short-lived ones.
func (w *world) hearRules() func() (added, removed int32) {
	w.Helper()
	var s *nl.NetlinkSocket
	w.in(w.r1, func() (err error) {
		s, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
		return err
	})
	w.Cleanup(s.Close)
	var added, removed atomic.Int32
	go func() {
		for {
			all, _, err := s.Receive()
			if err != nil {
				return // closed
			}
			for _, m := range all {
				switch m.Header.Type {
				case unix.RTM_NEWRULE:
					added.Add(1)
				case unix.RTM_DELRULE:
					removed.Add(1)
				}
			}
		}
	}()
	return func() (int32, int32) { return added.Load(), removed.Load() }
}

// Copies exist only for routes to main with a way around.
func TestKeepsNoOtherRoutes(t *testing.T) {
	w := newWorld(t)
	w.objects()
	for name, c := range map[string]struct {
		path func(p *Path)
		kept int
	}{
		"all":           {func(*Path) {}, 4},
		"no way for 4":  {func(p *Path) { p.Repairs[0].Segments4 = nil }, 3},
		"one prefix":    {func(p *Path) { p.Prefixes = prefixes("fd00:6::/48") }, 1},
		"within it":     {func(p *Path) { p.Prefixes = prefixes("fd00:6::1/128") }, 0},
		"a shadow":      {func(p *Path) { p.Shadow = true }, 0},
		"the same link": {func(p *Path) { p.Device = "back"; p.Repairs = []Repair{{Device: "main", Via: addrs("fd00:12::2")[0]}} }, 0},
	} {
		p := w.path(around())
		c.path(&p)
		w.apply(p)
		if got := w.state("core").Routes.Kept; got != c.kept {
			t.Errorf("%s: %d routes have copies, want %d", name, got, c.kept)
		}
	}
	w.remove()
	if got := w.tables(); strings.Contains(got, "proto 119") || strings.Contains(got, "lookup 1996") {
		t.Errorf("left: %s", got)
	}
}

// A copy counts even if its route is too new to be known. Its protocol is unknown then.
func TestLostCopies(t *testing.T) {
	at := func(table uint32, prefix string) tablePrefix { return tablePrefix{table, prefixes(prefix)[0]} }
	via := addrs("fd00:12::2")[0]
	copied := func(prefix string) tableRoute {
		return tableRoute{tablePrefix: at(keepTable(3), prefix), oif: 3, via: via, proto: keepProtocol, priority: keepMetric}
	}
	s := survey{routes: map[tablePrefix]standing{at(unix.RT_TABLE_MAIN, "fd00:4::/64"): {oif: 4}},
		kept: map[tableRoute]bool{copied("fd00:1::/64"): true, copied("fd00:2::/64"): true, copied("fd00:4::/64"): true}}
	alone := []lone{{tablePrefix: at(unix.RT_TABLE_MAIN, "fd00:2::/64"), via: via, proto: unix.RTPROT_ISIS, carrier: true},
		{tablePrefix: at(unix.RT_TABLE_MAIN, "fd00:3::/64"), via: via, proto: unix.RTPROT_ISIS}, {tablePrefix: at(unix.RT_TABLE_MAIN, "fd00:4::/64")}}
	got := map[string]bool{}
	for _, l := range s.lost(3, alone) {
		got[fmt.Sprint(l.to, " ", protocol(l.proto), " ", s.copied(3, l))] = true
	}
	want := map[string]bool{"fd00:1::/64 0 true": true, "fd00:2::/64 isis true": true, "fd00:3::/64 isis false": true}
	if !maps.Equal(got, want) {
		t.Errorf("lost %v, want %v", got, want)
	}
}

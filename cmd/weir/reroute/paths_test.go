// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/protect"
)

// Status names the routes over a link, and the fate of their packets, before and after a failure.
func TestRoutesText(t *testing.T) {
	const all = "routes: 5 use only eth1 and disappear when it is set down, drained or not; 3 of them disappear with its carrier"
	for name, c := range map[string]struct {
		routes protect.RouteState
		want   []string
	}{
		"none":     {protect.RouteState{}, nil},
		"kept":     {protect.RouteState{Alone: 5, Carrier: 3, Kept: 3, Followed: true}, []string{all, "weir serve then reroutes packets to 3, for 30s at most"}},
		"unserved": {protect.RouteState{Alone: 5, Carrier: 3, Kept: 3}, []string{all, "! packets to 3 are then rerouted only while weir serve runs: start it"}},
		"some":     {protect.RouteState{Alone: 5, Carrier: 3, Kept: 2, Followed: true}, []string{all, "! packets to 1 of these are then unreachable: weir doctor names them", "weir serve then reroutes packets to 2, for 30s at most"}},
		"in use":   {protect.RouteState{Kept: 3, Lost: 2, InUse: true, Followed: true}, []string{"! 2 routes disappeared with the carrier: packets are rerouted until the routing protocol has new routes"}},
		"over":     {protect.RouteState{Kept: 3, Lost: 2, Followed: true}, []string{"! 2 routes disappeared with the link, and no others replace them: packets are unreachable"}},
	} {
		if got := routesText(protect.PathState{Device: "eth1", Routes: c.routes}); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// A path without a usable repair is not shown as rerouted.
func TestLinkTextWithoutWay(t *testing.T) {
	down, up := protect.RepairState{Down: true}, protect.RepairState{}
	for want, p := range map[string]protect.PathState{
		"rerouted: not answered":                                {Repairs: []protect.RepairState{down, up}},
		"dropped, no way left: not answered":                    {Repairs: []protect.RepairState{down}, Dropped: []string{"IPv4", "IPv6"}, Remedy: "see the firewall"},
		"IPv6 dropped, no way left: not answered":               {Repairs: []protect.RepairState{down}, Dropped: []string{"IPv6"}, Remedy: "see the firewall"},
		"rerouted, but IPv4 dropped, no way left: not answered": {Repairs: []protect.RepairState{down, up}, Dropped: []string{"IPv4"}, Remedy: "see the firewall"},
	} {
		p.Name, p.Attached, p.Down, p.Probe = "core", true, true, true
		if got := linkText(p); got != want {
			t.Errorf("%q, want %q", got, want)
		}
		var out strings.Builder
		printPath(&out, p)
		if told := strings.Contains(out.String(), "! packets are dropped: see the firewall\n"); told != (len(p.Dropped) > 0) {
			t.Errorf("%s", &out)
		}
	}
}

// Status uses the words of the metric.
func TestFatesOfStatus(t *testing.T) {
	var out strings.Builder
	printPath(&out, protect.PathState{Name: "core", Counts: protect.Counts{Packets: 1, Exempt: 2, None: 3, Big: 4, Stuck: 5, Lost: 6, Odd: 7, Shadow: 8}})
	text := out.String()
	page, err := os.ReadFile("../../../docs/REROUTE.md")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	_, fates, _ := strings.Cut(string(page), "\n| `fate` of the metric |")
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| ([a-z :]+) \\| [^|]+ \\|$").FindAllStringSubmatch(fates, -1) {
		group, word, divided := strings.Cut(row[2], ": ")
		if fate := strings.ReplaceAll(strings.ReplaceAll(row[2], ": ", "_"), " ", "_"); fate != row[1] || !strings.Contains(text, group) || divided && !strings.Contains(text, word) {
			t.Errorf("fate %s is %q in the page, and status says\n%s", row[1], row[2], text)
		}
		n++
	}
	if n != 8 || !strings.Contains(text, "packets rerouted: 1 (0 at ingress, 0 not by the best repair), 4 too big\n  packets stayed: 5 (exempt 2, no repair 3)\n  packets dropped: 18 (no way left 5, too big 6, kernel 7)\n") {
		t.Errorf("%d fates in the page, and status says\n%s", n, text)
	}
}

// A path whose link should be judged by bfdd, and is not, is not shown as merely used. It has no row among sessions.
func TestPrintUnjudged(t *testing.T) {
	var out strings.Builder
	printPaths(&out, reroute.State{Paths: []protect.PathState{{Name: "core", Attached: true, Unjudged: true}, {Name: "edge", Attached: true}},
		BFD: []peers.SessionState{{Name: "core", Unjudged: true, Problem: "nobody judges link eth1"}}})
	if got := out.String(); !strings.Contains(got, "used, not monitored") || !strings.Contains(got, "core: nobody judges link eth1\n") || strings.Contains(got, "PEER STATE") || strings.Count(got, "nobody") != 1 {
		t.Errorf("%s", got)
	}
}

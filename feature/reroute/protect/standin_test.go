// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/protect/neigh"
)

// A link without a carrier from the start, with neighbours never asked, is rerouted while weir serve runs. Without
// weir serve the state reports the loss. Once the link is used again the neighbours are real.
func TestNeighbourNeverKnown(t *testing.T) {
	w := newWorld(t)
	const others = "fd00:12::77" // the operator's
	w.ip(w.r2, "link set main down")
	w.ip(w.r1, "neigh flush dev main", "-6 neigh flush dev main", "neigh add "+others+" lladdr "+newMAC+" dev main nud permanent")
	w.apply(w.path(around()))
	stop := w.serveNow()
	p6, p4 := w.pair(true), w.pair(false)
	w.until("it is rerouted", func() bool {
		return w.state("core").Down && p6.arrives(100, time.Second) && p4.arrives(100, time.Second)
	})
	if st := w.state("core"); len(st.Problems) > 0 || len(st.Unresolved) > 0 || !st.InForce || st.Counts.Packets < 2 {
		t.Errorf("rerouted: %+v", st)
	}
	stop()
	w.ip(w.r1, "neigh flush dev main", "-6 neigh flush dev main")
	st := w.state("core")
	if len(st.Unresolved) != 2 || st.InForce || !strings.Contains(strings.Join(st.Problems, "\n"), main4+", "+main6) {
		t.Errorf("without weir serve: %+v", st)
	}
	w.serveNow()
	w.until("it is rerouted again", func() bool { return p6.arrives(100, time.Second) && p4.arrives(100, time.Second) })
	w.ip(w.r2, "link set main up", "addr replace fd00:12::2/64 dev main nodad")
	w.until("it is used", func() bool { return !w.state("core").Down })
	w.until("neighbours are known", func() bool {
		show := w.ip(w.r1, "neigh show dev main") + w.ip(w.r1, "-6 neigh show dev main")
		return strings.Contains(show, main4+" lladdr") && strings.Contains(show, main6+" lladdr") && !strings.Contains(show, neigh.StandIn().String()) &&
			p6.arrives(100, time.Second) && p4.arrives(100, time.Second)
	})
	if got := w.entry("main", others); got != newMAC {
		t.Errorf("the operator's neighbour became %s", got)
	}
}

// A repair with a silent neighbour is reported before the link fails. It is a failure once the link is unusable.
func TestSilentRepair(t *testing.T) {
	w := newWorld(t)
	const silent = "fd00:13::9"
	r := around()
	r.Device, r.Via = "back", netip.MustParseAddr(silent)
	told := func() bool {
		st := w.state("core")
		return st.InForce != st.Down && len(st.Repairs) == 1 && st.Repairs[0].Silent && strings.Contains(strings.Join(st.Problems, "\n"), "no neighbour answers at "+silent)
	}
	w.apply(w.path(r))
	w.until("the kernel has given up", told)
	w.serveNow()
	w.until("weir serve has no answer", told)
	w.drain(true)
	w.until("it is a failure", func() bool { return w.state("core").Down && told() })
	w.ip(w.r3, "addr add "+silent+"/64 dev r1 nodad")
	w.until("the neighbour is known", func() bool { st := w.state("core"); return st.InForce && len(st.Problems) == 0 })
}

// Stand-ins of an unusable link with a carrier yield to answering neighbours. None remains after protection is
// removed.
func TestStandInGivesWay(t *testing.T) {
	w := newWorld(t)
	w.ip(w.r2, "addr del "+main6+"/64 dev main", "addr del "+main4+"/24 dev main")
	w.ip(w.r1, "neigh flush dev main", "-6 neigh flush dev main")
	w.apply(w.path(around()))
	w.drain(true)
	stop := w.serveNow()
	p6, p4 := w.pair(true), w.pair(false)
	w.until("it is rerouted", func() bool { return p6.arrives(100, time.Second) && p4.arrives(100, time.Second) })
	w.ip(w.r2, "addr add "+main4+"/24 dev main")
	w.until("the neighbour is kept", func() bool { return strings.Contains(w.ip(w.r1, "neigh show "+main4+" dev main"), "PERMANENT") })
	if got := w.entry("main", main6); got != neigh.StandIn().String() {
		t.Errorf("the other one is %q", got)
	}
	stop()
	w.remove()
	for _, a := range []string{main4, main6} {
		if got := w.entry("main", a); got == neigh.StandIn().String() {
			t.Errorf("%s has a stand-in still", a)
		}
	}
}

// The log reports a link in use again, for any cause, including a new interface with the old name.
func TestToldUsed(t *testing.T) {
	w := newWorld(t)
	w.apply(w.path(around()))
	log := &heardLog{testLog: testLog{t}}
	stop := w.serveTo(log)
	defer stop()
	w.until("links are followed", func() bool { return log.count("links are followed") > 0 })
	w.drain(true)
	w.until("it is down", func() bool { return w.state("core").Down })
	time.Sleep(3 * pollInterval) // until the watcher has looked
	w.drain(false)
	w.until("it is told of", func() bool { return log.count("link is used again") == 1 })
	w.ip(w.r1, "link del main")
	w.until("it is missed", func() bool { return log.count("link is down") == 1 && len(w.state("core").Problems) > 0 })
	time.Sleep(10 * quiet) // until reconcile is done
	w.cable(w.r1, "main", w.r2, "main", "fd00:12::1/64", "fd00:12::2/64")
	w.until("the new one is told of", func() bool { return log.count("link is used again") == 2 })
}

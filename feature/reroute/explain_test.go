// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"fmt"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// Explain says by which link a forwarded packet leaves: the link, its repair, or none.
func TestExplain(t *testing.T) {
	w := newWorld(t)
	apply := func(shadow bool) {
		w.apply(fmt.Sprintf(`
reroute:
  - {name: there, netns: %[1]s, interface: r12, shadow: %[2]t, repairs: [{segments: [fc00:3::e, fc00:2::d6], interface: r13, via: "fd00:13::3"}]}
  - {name: around, netns: %[1]s, interface: r13, repairs: [{interface: r12, via: "fd00:12::2"}]}
`, w.name[w.r1], shadow))
	}
	apply(false)
	explain := func(to string) []feature.Verdict {
		t.Helper()
		p, err := feature.ParsePacket("udp", "[fd00:a::2]:9001", to)
		if err != nil {
			t.Fatal(err)
		}
		p.Netns, p.Interface = w.name[w.r1], "in"
		got, err := Feature{}.Explain(t.Context(), w.root, p)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	check := func(text, result string, warning bool) {
		t.Helper()
		got := explain("[fd00:d::2]:9000")
		if len(got) != 1 || got[0].Step != "reroute path there" || !strings.Contains(got[0].Text, text) || got[0].Result != result || got[0].Warning != warning || got[0].Stage != feature.StageForward {
			t.Errorf("explained %+v, want %q, %q", got, text, result)
		}
	}
	for _, to := range []string{"[fd00:12::1]:9000", "[fd00:a::7]:9000"} { // local, and by a link that no path protects
		if got := explain(to); len(got) != 0 {
			t.Errorf("%s: %+v", to, got)
		}
	}
	drain := func(path string) {
		w.locked(func(l *kernel.WriteLock) error { return Drain(l, path) })
	}
	check("link r12 is used", "", false)
	drain("there")
	check("link r12 may not be used (drained): the packet is rerouted by r13 to fd00:13::3", "forwarded to fd00:d::2, rerouted by r13 to fd00:13::3", false)
	drain("around")
	check("no way is left for IPv6 packets", "dropped: path there has no way left", true)
	apply(true)
	check("no repair for IPv6 packets may be used: they stay on it", "", true)
}

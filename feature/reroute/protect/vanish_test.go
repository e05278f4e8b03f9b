// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// routed reports whether r1 has a route to an address.
func (w *world) routed(to string) bool {
	w.Helper()
	err := w.r1.Do(func() error { return exec.Command("ip", "route", "get", to).Run() })
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		w.Fatal(err)
	}
	return err == nil
}

// becomes waits for routed to be as given.
func (w *world) becomes(to string, routed bool) {
	w.Helper()
	nstest.Eventually(w, func() error {
		if w.routed(to) != routed {
			return fmt.Errorf("%s: routed is not %t", to, routed)
		}
		return nil
	})
}

// The kernel behaves as the warning says: routes with next-hop objects vanish with the carrier, all others stay.
func TestRoutesGoWithCarrier(t *testing.T) {
	w := newWorld(t)
	w.ip(w.r1, "nexthop add id 6 via fd00:12::2 dev main", "nexthop add id 4 via 10.12.0.2 dev main",
		"route add fd00:6::/64 nhid 6", "route add 10.66.0.0/16 nhid 4", // vanish
		"route add fd00:7::/64 nhid 6", "route add fd00:7::/64 via fd00:12::2 dev main metric 4278190080", // stays by the operator's route
		"route add 10.77.0.0/16 nhid 4", "addr add 10.13.0.1/24 dev back", "route add 10.77.0.0/16 via 10.13.0.3 dev back metric 4278190080") // stays by another link
	said := w.apply(w.path(around()))
	warning := ""
	for _, s := range said {
		if strings.Contains(s, "loses its carrier") {
			warning += s
		}
	}
	if !strings.Contains(warning, "10.66.0.0/16, fd00:6::/64: no route is left once interface main loses its carrier") ||
		!strings.Contains(warning, "ip route add PREFIX via NEIGHBOR dev main metric 4278190080") || strings.Contains(warning, "more") {
		t.Errorf("said %q", said)
	}
	st, err := ReadState(t.Context(), w.root)
	if err != nil {
		t.Fatal(err)
	}
	if v := Vanishing(st); len(v) != 1 || v[0].Path != "core" || !strings.Contains(warning, v[0].Text) {
		t.Errorf("found %+v", v)
	}
	w.ip(w.r2, "link set main down") // the other end of the cable
	w.becomes("fd00:6::1", false)
	w.becomes("10.66.0.1", false)
	for _, to := range []string{"fd00:7::1", "10.77.0.1", addrD, addrD4} {
		if !w.routed(to) {
			t.Errorf("%s has no route", to)
		}
	}
}

// A device set down loses all its routes. Drain reports the destinations without another one.
func TestRoutesGoWithDevice(t *testing.T) {
	w := newWorld(t)
	w.ip(w.r1, "route add fd00:6::/64 via fd00:12::2 dev main", "route add fd00:7::/64 via fd00:12::2 dev main", "route add fd00:7::/64 via fd00:13::3 dev back metric 2000")
	w.apply(w.path(around()))
	w.drain(true)
	text, err := GoWithDown(w.root, "core")
	if err != nil || !strings.Contains(text, "fd00:6::/64") || strings.Contains(text, "fd00:7::/64") || !strings.Contains(text, "interface main only") {
		t.Errorf("said %q, %v", text, err)
	}
	w.ip(w.r1, "link set main down")
	w.becomes("fd00:6::1", false)
	w.becomes("fd00:7::1", true)
	w.becomes(addrD, false)
	if _, err := GoWithDown(kernel.OpenRoot(w.root.Path()), "nothing"); !errors.Is(err, errNoPath) {
		t.Errorf("a path that is not there: %v", err)
	}
}

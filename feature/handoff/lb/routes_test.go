// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/nstest"
)

// TestRouteRemoved checks that the agent restores routes of services' addresses after another
// program removed them.
func TestRouteRemoved(t *testing.T) {
	sc, _, _, _ := managed(t, AgentOptions{})
	routed := func(a netip.Addr) (there bool) {
		do(t, sc.f.ns, func() error {
			got, err := netlink.RouteGet(a.AsSlice())
			there = err == nil && len(got) == 1 && got[0].LinkIndex == sc.f.buffer.Ifindex
			return nil
		})
		return there
	}
	for _, a := range []netip.Addr{service4.Addr(), service6.Addr()} {
		if !routed(a) {
			t.Fatalf("no route leads to %s", a)
		}
		// The agent may restore the route before the check. Remove it again then.
		nstest.Eventually(t, func() error {
			do(t, sc.f.ns, func() error {
				all, err := dump.RouteList(nil, netlink.FAMILY_ALL)
				if err != nil {
					return err
				}
				for _, r := range all {
					if r.LinkIndex == sc.f.buffer.Ifindex && r.Dst != nil && r.Dst.IP.Equal(a.AsSlice()) {
						return netlink.RouteDel(&r)
					}
				}
				t.Errorf("there is no route to %s to remove", a)
				return nil
			})
			if routed(a) {
				return fmt.Errorf("the route to %s is not gone", a)
			}
			return nil
		})
	}
	for _, a := range []netip.Addr{service4.Addr(), service6.Addr()} {
		nstest.Eventually(t, func() error {
			if !routed(a) {
				return fmt.Errorf("no route leads to %s any more", a)
			}
			return nil
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/hook"
)

// removeFunctions deletes the routes of all functions in a namespace, as systemd-networkd does with foreign routes.
func removeFunctions(p *pair) {
	p.t.Helper()
	inside(p.t, p.w.A, func() error {
		all, err := hook.Segments()
		if err != nil {
			return err
		}
		if len(all) == 0 {
			p.t.Error("there is no route of a function to remove")
		}
		for _, g := range all {
			if err := g.Detach(); err != nil {
				return err
			}
		}
		return nil
	})
}

// A deleted route of a function is reported while it is missing. Run restores it within seconds, also in a VRF.
func TestFunctionRouteRemoved(t *testing.T) {
	for name, table := range map[string]uint32{"main table": 0, "vrf": 77} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t)
			if table != 0 {
				overWire(t, p.w.A, func(under netlink.Link) error {
					a := netlink.NewLinkAttrs()
					a.Name = "red"
					v := &netlink.Vrf{LinkAttrs: a, Table: table}
					if err := netlink.LinkAdd(v); err != nil {
						return err
					}
					if err := netlink.LinkSetUp(v); err != nil {
						return err
					}
					return netlink.LinkSetMasterByIndex(under, v.Index)
				})
				addressOn(t, p.w.A, nstest.WireDevice, "fd79::1/64")
			}
			a, b := p.sessions(10 * time.Millisecond)
			p.apply(p.w.NameA, a)
			p.apply(p.w.NameB, b)
			if table == 0 {
				p.within(patience, "up", bothUp)
			}
			removeFunctions(p)
			if got := p.state().session("to-b").Problem; !strings.Contains(got, functionA.String()) {
				t.Errorf("the route is away, and the session's problem is %q", got)
			}
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = Run(ctx, p.root, said{t})
			}()
			t.Cleanup(func() { cancel(); <-ended })
			p.within(patience, "answered again", func(a, _ SessionState) bool { return a.Problem == "" })
			removeFunctions(p) // while Run knows the route
			p.within(patience, "answered once more", func(a, _ SessionState) bool { return a.Problem == "" })
			if table == 0 {
				p.within(patience, "up again", bothUp)
			}
		})
	}
}

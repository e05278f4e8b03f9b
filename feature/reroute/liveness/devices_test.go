// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// Sessions work on devices other than the end of a wire.
func TestDevices(t *testing.T) {
	for _, c := range []struct {
		name   string
		device string                                              // of the sessions
		make   func(under netlink.Link, a netlink.LinkAttrs) error // in each namespace, over the wire's end
		after  func(under netlink.Link) error
	}{
		{"vlan", "w0.7", addVLAN, nil},
		{"bond", "bond7", func(under netlink.Link, a netlink.LinkAttrs) error {
			b := netlink.NewLinkBond(a)
			b.Mode = netlink.BOND_MODE_ACTIVE_BACKUP
			if err := netlink.LinkAdd(b); err != nil {
				return err
			}
			if err := netlink.LinkSetDown(under); err != nil {
				return err
			}
			return netlink.LinkSetMasterByIndex(under, b.Index)
		}, netlink.LinkSetUp},
		{"macvlan", "mac7", addMacvlan, nil},
		{"vrf", "w0", func(under netlink.Link, a netlink.LinkAttrs) error {
			a.Name = "red"
			v := &netlink.Vrf{LinkAttrs: a, Table: 77}
			if err := netlink.LinkAdd(v); err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetUp(v), netlink.LinkSetMasterByIndex(under, v.Index))
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPair(t)
			for i, ns := range []*netns.Handle{p.w.A, p.w.B} {
				overWire(t, ns, func(under netlink.Link) error {
					a := netlink.NewLinkAttrs()
					a.Name = c.device
					if err := c.make(under, a); err != nil {
						return err
					}
					if c.after != nil {
						return c.after(under)
					}
					return nil
				})
				addressOn(t, ns, c.device, []string{"fd79::1/64", "fd79::2/64"}[i])
			}
			a, b := p.sessions(10 * time.Millisecond)
			a.Device, a.Via, a.Source = c.device, netip.MustParseAddr("fd79::2"), netip.MustParseAddr("fd79::1")
			b.Device, b.Via, b.Source = c.device, netip.MustParseAddr("fd79::1"), netip.MustParseAddr("fd79::2")
			p.apply(p.w.NameA, a)
			p.apply(p.w.NameB, b)
			p.within(patience, "up", bothUp)
			cut(t, p.w.B, nstest.WireDevice, true)
			p.within(patience, "down", func(a, b SessionState) bool { return a.Phase == Down && b.Phase == Down })
			cut(t, p.w.B, nstest.WireDevice, false)
			p.within(patience, "up again", bothUp)
		})
	}
}

func addVLAN(under netlink.Link, a netlink.LinkAttrs) error {
	a.ParentIndex = under.Attrs().Index
	return netlink.LinkAdd(&netlink.Vlan{LinkAttrs: a, VlanId: 7})
}

func addMacvlan(under netlink.Link, a netlink.LinkAttrs) error {
	a.ParentIndex = under.Attrs().Index
	return netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_BRIDGE})
}

// A device and one above it both have sessions. The lower device sees the upper one's packets first and ignores them.
func TestLowerAndUpper(t *testing.T) {
	for _, c := range []struct {
		name, device string
		make         func(under netlink.Link, a netlink.LinkAttrs) error
	}{{"vlan", "w0.7", addVLAN}, {"macvlan", "mac7", addMacvlan}} {
		t.Run(c.name, func(t *testing.T) {
			p := newPair(t)
			for i, ns := range []*netns.Handle{p.w.A, p.w.B} {
				overWire(t, ns, func(under netlink.Link) error {
					a := netlink.NewLinkAttrs()
					a.Name = c.device
					return c.make(under, a)
				})
				addressOn(t, ns, c.device, []string{"fd79::1/64", "fd79::2/64"}[i])
			}
			a, b := p.sessions(10 * time.Millisecond)
			upperA, upperB := a, b
			upperA.Name, upperA.ID, upperA.Device, upperA.Via, upperA.Source = "upper-to-b", 8, c.device, netip.MustParseAddr("fd79::2"), netip.MustParseAddr("fd79::1")
			upperB.Name, upperB.ID, upperB.Device, upperB.Via, upperB.Source = "upper-to-a", 8, c.device, netip.MustParseAddr("fd79::1"), netip.MustParseAddr("fd79::2")
			p.apply(p.w.NameA, a, upperA)
			p.apply(p.w.NameB, b, upperB)
			names := []string{"to-b", "to-a", "upper-to-b", "upper-to-a"}
			up := func() bool {
				st := p.state()
				return !slices.ContainsFunc(names, func(name string) bool { return st.session(name).Phase != Up })
			}
			nstest.Eventually(t, func() error {
				if !up() {
					return fmt.Errorf("not all up: %+v", p.state())
				}
				return nil
			})
			st := p.state()
			for _, name := range names {
				if n := st.session(name).Counts["elsewhere"]; n != 0 {
					t.Errorf("%s: %d packets were judged at another device", name, n)
				}
			}
		})
	}
}

// A session accepts an alternative name of its device without a problem.
func TestAlternativeName(t *testing.T) {
	p := newPair(t)
	const name = "alternative"
	overWire(t, p.w.A, func(under netlink.Link) error { return netlink.LinkAddAltName(under, name) })
	a, b := p.sessions(10 * time.Millisecond)
	a.Device = name
	p.apply(p.w.NameA, a)
	p.apply(p.w.NameB, b)
	p.within(patience, "up, without a problem", func(a, b SessionState) bool { return bothUp(a, b) && a.Problem == "" && b.Problem == "" })
}

// overWire creates a device over the wire's end. The test is skipped on kernels without this kind of device.
func overWire(t *testing.T, ns *netns.Handle, f func(under netlink.Link) error) {
	t.Helper()
	var err error
	inside(t, ns, func() error {
		var l netlink.Link
		if l, err = netlink.LinkByName(nstest.WireDevice); err == nil {
			err = f(l)
		}
		return nil
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("need: kernel with devices of this kind (CONFIG_VLAN_8021Q, CONFIG_BONDING, CONFIG_NET_VRF)")
	} else if err != nil {
		t.Fatal(err)
	}
}

// A recreated device has its session again within seconds without any apply. Its index may be new or old, and links
// or filters may hold its program.
func TestDeviceAnew(t *testing.T) {
	for name, c := range map[string]struct{ same, filters bool }{
		"another number": {}, "the same number": {same: true},
		"another number, without tcx": {filters: true}, "the same number, without tcx": {same: true, filters: true},
	} {
		t.Run(name, func(t *testing.T) {
			same := c.same
			if c.filters {
				has := hasTCX
				t.Cleanup(func() { hasTCX = has })
				hasTCX = func() bool { return false }
			}
			if _, err := exec.LookPath("ip"); err != nil {
				t.Skip("need: tool ip (Debian package iproute2)")
			}
			p := newPair(t)
			a, b := p.sessions(10 * time.Millisecond)
			p.apply(p.w.NameA, a)
			p.apply(p.w.NameB, b)
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = Run(ctx, p.root, said{t})
			}()
			t.Cleanup(func() { cancel(); <-ended })
			p.within(patience, "up", bothUp)
			number := func() string {
				return fmt.Sprint(nstest.Ifindex(t, p.w.A, nstest.WireDevice), nstest.Ifindex(t, p.w.B, nstest.WireDevice))
			}
			before := number()
			ip := func(format string, a ...any) {
				t.Helper()
				inside(t, p.w.A, func() error {
					out, err := exec.Command("ip", strings.Fields(fmt.Sprintf(format, a...))...).CombinedOutput()
					if err != nil {
						return fmt.Errorf("%w: %s", err, out)
					}
					return nil
				})
			}
			ip("link del w0")
			p.within(patience, "down", func(a, _ SessionState) bool { return a.Phase == Down })
			if same {
				var a, b int
				_, _ = fmt.Sscan(before, &a, &b)
				ip("link add w0 index %d type veth peer name w0 index %d netns %s", a, b, p.w.NameB)
				ip("link set w0 up")
				ip("-n %s link set w0 up", p.w.NameB)
			} else {
				nstest.Cable(t, p.w.A, nstest.WireDevice, p.w.B, nstest.WireDevice)
			}
			addressOn(t, p.w.A, nstest.WireDevice, "fd77::1/64")
			addressOn(t, p.w.B, nstest.WireDevice, "fd77::2/64")
			if now := number(); (now == before) != same {
				t.Fatalf("the devices %s were made anew as %s", before, now)
			}
			p.within(patience, "up again", bothUp)
			p.words(0)
		})
	}
}

// A device recreated while its link is dead stays down until probes are answered. This holds even if a command runs
// while the device is missing.
func TestDeviceAnewOfDeadLink(t *testing.T) {
	for name, looked := range map[string]bool{"a command meanwhile": true, "none": false} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t)
			a, b := p.sessions(10 * time.Millisecond)
			p.apply(p.w.NameA, a)
			p.apply(p.w.NameB, b)
			p.within(patience, "up", bothUp)
			inside(t, p.w.A, func() error { return exec.Command("ip", "link", "del", nstest.WireDevice).Run() })
			p.within(patience, "down", func(a, _ SessionState) bool { return a.Phase == Down })
			look := func() {
				l := p.lock()
				defer l.Unlock()
				if err := Recover(l); err != nil {
					t.Fatal(err)
				}
			}
			if looked {
				look()
			}
			nstest.Cable(t, p.w.A, nstest.WireDevice, p.w.B, nstest.WireDevice)
			cut(t, p.w.B, nstest.WireDevice, true)
			addressOn(t, p.w.A, nstest.WireDevice, "fd77::1/64")
			addressOn(t, p.w.B, nstest.WireDevice, "fd77::2/64")
			look()
			p.words(links.Probe)
			if s := p.state().session("to-b"); s.Phase != Down || !s.Kept || s.Problem != "" {
				t.Errorf("anew: %+v", s)
			}
			cut(t, p.w.B, nstest.WireDevice, false)
			p.within(patience, "up again", bothUp)
			p.words(0)
		})
	}
}

type said struct{ testing.TB }

func (s said) Info(msg string, a ...any) { s.Log(append([]any{msg}, a...)...) }
func (s said) Warn(msg string, a ...any) { s.Log(append([]any{"warning:", msg}, a...)...) }

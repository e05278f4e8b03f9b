// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/audit"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// A real isisd with TI-LFA computes backups, but none is in the kernel: the report shows no protection. A route added
// by hand is reported.
func TestAudit(t *testing.T) {
	frrtest.Need(t, "isisd")
	n := frrtest.NewNet(t, "a", "b", "c", "d")
	n.OnlyISIS = true
	port := func(name string) frrtest.Port { return frrtest.Port{Name: name, Metric: 10} }
	for _, c := range []string{"ab", "bc", "cd", "da"} {
		a, b := c[:1], c[1:]
		n.Cable(a, port(a+"to"+b), b, port(b+"to"+a))
	}
	a := n.Start()[0]
	root := kernel.OpenRoot(filepath.Join(nstest.BPFFS, "audit"))
	run := func() (*audit.Report, error) {
		v := audit.Local(a.Home)
		network, err := audit.Topology(v)
		if err != nil {
			return nil, err
		}
		var r *audit.Report
		err = a.NS.Do(func() error {
			here, err := netns.Current()
			if err != nil {
				return err
			}
			defer here.Close()
			own, err := protect.ReadNamespace(root, here)
			if err == nil {
				r, err = audit.Run(v, network, plan.Options{Mode: plan.Link}, own.Paths)
			}
			return err
		})
		return r, err
	}
	var report *audit.Report
	var err error
	complete := func(r audit.Row) bool { return r.Route && len(r.Planned) > 0 && len(r.Backup) > 0 }
	// c has two equal ways protecting each other. The far links of b and d have a backup.
	nstest.Within(t, 3*time.Minute, func() error {
		if report, err = run(); err == nil && len(report.Rows) >= 4 && slices.ContainsFunc(report.Rows, complete) {
			return nil
		}
		return fmt.Errorf("%v: %+v", err, report)
	})
	if report.Router != "a" || report.InKernel != 0 || report.InWeir != 0 {
		t.Errorf("%+v", report)
	}
	t.Logf("%d prefixes have a backup in isisd; %d in zebra, %d in the kernel", len(report.Rows), report.InZebra, report.InKernel)
	row := report.Rows[slices.IndexFunc(report.Rows, complete)]
	link := primary(t, a, row)
	change(t, a, netlink.RouteAdd, row.Prefix, row.Backup[0])
	nstest.Eventually(t, func() error { // isisd's routers may lose their adjacencies, and so the backups, for a while
		again, err := run()
		if err == nil && again.InKernel != 1 {
			err = fmt.Errorf("%d in the kernel, want the one that was put there: %+v", again.InKernel, again)
		}
		return err
	})

	change(t, a, netlink.RouteDel, row.Prefix, row.Backup[0]) // zebra removed its own route in favour of this

	// Weir's repairs are reported, for a prefix with a backup of isisd and for one without.
	own := netip.MustParsePrefix("fd00:77::/64")
	protectIt(t, root, protect.Path{Name: "far", Netns: a.NS.String()[strings.LastIndex(a.NS.String(), " ")+1:], Device: link, Prefixes: []netip.Prefix{row.Prefix, own},
		Repairs: []protect.Repair{{Device: row.Backup[0].Interface, Via: row.Backup[0].Gateway}}})
	at := func(r *audit.Report, p netip.Prefix) (found audit.Row) {
		if i := slices.IndexFunc(r.Rows, func(r audit.Row) bool { return r.Prefix == p }); i >= 0 {
			found = r.Rows[i]
		}
		return found
	}
	nstest.Within(t, 3*time.Minute, func() error {
		got, err := run()
		if err != nil {
			t.Fatal(err)
		}
		has, alone := at(got, row.Prefix).Weir, at(got, own)
		seen := len(has) == 1 && has[0].Path == "far" && has[0].Link == link && has[0].InForce() && len(has[0].Repairs) == 1 && has[0].Repairs[0].Device == row.Backup[0].Interface
		if seen && got.InWeir == 1 && alone.Prefix == own && !alone.Route && len(alone.Weir) == 0 {
			return nil
		}
		return fmt.Errorf("%d prefixes in weir: %+v, and its own %+v", got.InWeir, has, alone)
	})
}

// primary returns a link of the kernel's routes to a row's prefix, different from the backup's.
func primary(t *testing.T, r *frrtest.Router, row audit.Row) (name string) {
	t.Helper()
	look := func() error {
		dst := &net.IPNet{IP: row.Prefix.Addr().AsSlice(), Mask: net.CIDRMask(row.Prefix.Bits(), 128)}
		routes, err := dump.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Dst: dst}, netlink.RT_FILTER_DST)
		for _, r := range routes {
			index := r.LinkIndex
			for _, h := range r.MultiPath {
				index = h.LinkIndex
				if link, err := netlink.LinkByIndex(index); err == nil && link.Attrs().Name != row.Backup[0].Interface {
					break
				}
			}
			if link, err := netlink.LinkByIndex(index); err == nil && link.Attrs().Name != row.Backup[0].Interface {
				name = link.Attrs().Name
			}
		}
		return err
	}
	nstest.Eventually(t, func() error {
		if err := r.NS.Do(look); err != nil {
			t.Fatal(err)
		}
		if name == "" {
			return fmt.Errorf("no route to %s beside the backup", row.Prefix)
		}
		return nil
	})
	return name
}

// protectIt applies a path until the test ends.
func protectIt(t *testing.T, root *kernel.Root, p protect.Path) {
	t.Helper()
	locked := func(ctx context.Context, f func(*kernel.WriteLock) error) {
		l, err := root.Lock(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		defer l.Unlock()
		if err := f(l); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(func() {
		locked(context.Background(), func(l *kernel.WriteLock) error { return protect.Remove(context.Background(), l) })
	})
	locked(t.Context(), func(l *kernel.WriteLock) error {
		plan, err := protect.Plan(t.Context(), protect.State{}, protect.Config{Paths: []protect.Path{p}})
		if err != nil {
			return err
		}
		return protect.Apply(t.Context(), l, plan)
	})
}

// Of a link's paths, the one with the longest covering prefix applies, then the one without prefixes.
func TestInstalled(t *testing.T) {
	path := func(name, link string, prefixes ...string) protect.PathState {
		p := protect.PathState{Name: name, Device: link, Attached: true, Repairs: []protect.RepairState{{Device: "x"}}}
		for _, text := range prefixes {
			p.Prefixes = append(p.Prefixes, netip.MustParsePrefix(text))
		}
		return p
	}
	paths := []protect.PathState{path("rest", "ab"), path("wide", "ab", "fd00::/16"), path("narrow", "ab", "fd00:5::/32", "fd00:3::/32"), path("other", "ad", "fd00:9::/32")}
	for _, c := range []struct{ prefix, links, want string }{
		{"fd00:3::/64", "ab", "narrow"},
		{"fd00:4::/64", "ab", "wide"},
		{"2001:db8::/64", "ab", "rest"},
		{"fd00::/8", "ab", "rest"},
		{"fd00:3::/64", "ad", ""},
		{"fd00:9::/64", "ad ab ad", "other wide"},
		{"fd00:3::/64", "", ""},
	} {
		if got := strings.Join(audit.InstalledAt(strings.Fields(c.links), netip.MustParsePrefix(c.prefix), paths), " "); got != c.want {
			t.Errorf("%s by %s: %q, want %q", c.prefix, c.links, got, c.want)
		}
	}
}

// change adds or deletes a route to a prefix by a backup.
func change(t *testing.T, r *frrtest.Router, do func(*netlink.Route) error, p netip.Prefix, hop audit.NextHop) {
	t.Helper()
	err := r.NS.Do(func() error {
		link, err := netlink.LinkByName(hop.Interface)
		if err != nil {
			return err
		}
		return do(&netlink.Route{Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 128)},
			Gw: hop.Gateway.AsSlice(), LinkIndex: link.Attrs().Index, Priority: 4000})
	})
	if err != nil {
		t.Fatal(err)
	}
}

const backups = `Area 1:
IS-IS L2 IPv4 routing table:

 Prefix       Metric  Interface  Nexthop   Label(s)     
 -------------------------------------------------------
 10.0.1.0/24  40      ad         10.0.5.1  16003        

IS-IS L2 IPv6 routing table:

 Prefix         Metric  Interface  Nexthop                    Label(s)     
 --------------------------------------------------------------------------
 fd00:3::/64    30      ad         fe80::f81d:b2ff:fee8:2236  -            
 fd00:9::4/128  60      ab0        fe80::1c0f:44ff:fe66:b3bc  16103/15003  
                        ab1        fe80::6c47:d8ff:fe22:8a09  16103/15003  

`

// The input is FRR 8.4.4's output for a network with two parallel links.
func TestParse(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{backups, "fd00:3::/64 [{ad fe80::f81d:b2ff:fee8:2236 }]; fd00:9::4/128 [{ab0 fe80::1c0f:44ff:fe66:b3bc 16103/15003} {ab1 fe80::6c47:d8ff:fe22:8a09 16103/15003}]"},
		{"", ""},
		{"IS-IS L2 IPv6 routing table:\n fd00:3::/64 30 ad\n", `has 3 columns`},
	} {
		got, err := audit.ParseBackups(c.text)
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, c.want) || c.want == "" && got != "" {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
}

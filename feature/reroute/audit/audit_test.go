// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/audit"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// A real isisd with TI-LFA computes backups, and none of them is in the kernel: so a user sees that there is no
// protection. A route that is put there by hand is seen.
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
	run := func() (*audit.Report, error) {
		v := audit.Local(a.Home)
		network, err := audit.Topology(v)
		if err != nil {
			return nil, err
		}
		var r *audit.Report
		err = a.NS.Do(func() error {
			r, err = audit.Run(v, network, plan.Options{Mode: plan.Link})
			return err
		})
		return r, err
	}
	var report *audit.Report
	var err error
	complete := func(r audit.Row) bool { return r.Route && len(r.Planned) > 0 && len(r.Backup) > 0 }
	// c is reached by two equal ways: each protects the other. b's and d's far links have a backup.
	for end := time.Now().Add(3 * time.Minute); ; time.Sleep(300 * time.Millisecond) {
		if report, err = run(); err == nil && len(report.Rows) >= 4 && slices.ContainsFunc(report.Rows, complete) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%v: %+v", err, report)
		}
	}
	if report.Router != "a" || report.InKernel != 0 {
		t.Errorf("%+v", report)
	}
	t.Logf("%d prefixes have a backup in isisd; %d in zebra, %d in the kernel", len(report.Rows), report.InZebra, report.InKernel)
	row := report.Rows[slices.IndexFunc(report.Rows, complete)]
	install(t, a, row.Prefix, row.Backup[0])
	again, err := run()
	for end := time.Now().Add(time.Minute); (err != nil || again.InKernel != 1) && time.Now().Before(end); again, err = run() {
		time.Sleep(300 * time.Millisecond) // isisd's routers may have lost each other, and their backups, for a while
	}
	if err != nil || again.InKernel != 1 {
		t.Errorf("%v: %d in the kernel, want the one that was put there: %+v", err, again.InKernel, again)
	}
}

func install(t *testing.T, r *frrtest.Router, p netip.Prefix, hop audit.NextHop) {
	t.Helper()
	err := r.NS.Do(func() error {
		link, err := netlink.LinkByName(hop.Interface)
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 128)},
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

// What FRR 8.4.4 printed of a network with two parallel links.
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

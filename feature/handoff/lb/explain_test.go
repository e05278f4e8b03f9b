// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/tunnel"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// explains explains a packet in a network namespace. It returns the last verdict and the text of
// all.
func explains(t *testing.T, root *kernel.Root, ns *netns.Handle, device, proto string, from, to netip.AddrPort) (last feature.Verdict, text string) {
	t.Helper()
	p := feature.Packet{Proto: proto, From: from, To: to, Inode: ns.Inode(), Interface: device}
	all, err := Feature{}.Explain(t.Context(), root, p)
	if err != nil || len(all) == 0 {
		t.Fatalf("%s to %s by %s: %+v, %v", from, to, device, all, err)
	}
	for _, v := range all {
		text += v.Text + "\n"
	}
	return all[len(all)-1], text
}

// client returns the client's end of a connection to a service.
func client(to netip.AddrPort, port int) netip.AddrPort {
	if to.Addr().Is4() {
		return netip.AddrPortFrom(netip.MustParseAddr("10.1.0.2"), uint16(port))
	}
	return netip.AddrPortFrom(netip.MustParseAddr("fd01::2"), uint16(port))
}

// dialFrom connects from a port and returns the answering host.
func dialFrom(t *testing.T, sc *scene, from, to netip.AddrPort) (net.Conn, byte) {
	t.Helper()
	var c net.Conn
	do(t, sc.client, func() (err error) {
		d := net.Dialer{Timeout: patience, LocalAddr: net.TCPAddrFromAddrPort(from)}
		c, err = d.DialContext(t.Context(), "tcp", to.String())
		return err
	})
	t.Cleanup(func() { c.Close() })
	got, err := ask(c, "a", patience)
	if err != nil {
		t.Fatal(err)
	}
	return c, got[0]
}

// backendOf returns the backend of a result, which must name the path to it.
func backendOf(t *testing.T, v feature.Verdict, way string) byte {
	t.Helper()
	for _, n := range "12" {
		if v.Result == fmt.Sprintf("backend number %c, %s", n, strings.ReplaceAll(way, "N", string(n))) {
			return byte(n)
		}
	}
	t.Fatalf("%+v: want a backend %s", v, way)
	return 0
}

// TestExplain checks that a new connection goes to the explained backend, and a known one stays
// there. Explaining neither counts nor learns.
func TestExplain(t *testing.T) {
	for name, tcx := range map[string]bool{"tcx": true, "filters": false} {
		if tcx && !hasTCX() {
			continue // this kernel has filters alone
		}
		t.Run(name, func(t *testing.T) {
			if !tcx {
				was := hasTCX
				hasTCX = func() bool { return false }
				defer func() { hasTCX = was }()
			}
			sc, root := published(t)
			serve(t, sc.hosts, service4)
			serve(t, sc.hosts, service6)
			before, err := sc.f.Status()
			if err != nil {
				t.Fatal(err)
			}
			explains(t, root, sc.middle, "c", "tcp", client(service4, 20000), service4)
			if after, err := sc.f.Status(); err != nil || after.Counts != before.Counts || after.Flows != 0 {
				t.Errorf("%+v, %v: explaining counts or learns", after, err)
			}
			explainsConnections(t, sc, root, service4)
			explainsConnections(t, sc, root, service6)
		})
	}
}

// explainsConnections compares connections with their explanations.
func explainsConnections(t *testing.T, sc *scene, root *kernel.Root, to netip.AddrPort) {
	t.Helper()
	seen := map[byte]bool{}
	for port := 20000; port < 20012; port++ {
		from := client(to, port)
		v, text := explains(t, root, sc.middle, "c", "tcp", from, to)
		want := backendOf(t, v, "by hN")
		if v.Stage != feature.StageTC || v.Order < 1 || v.Warning || !strings.Contains(text, "the flow is new, and bucket ") {
			t.Errorf("%s: %+v", from, v)
		}
		if _, got := dialFrom(t, sc, from, to); got != want {
			t.Errorf("%s went to %c, and %s was told", from, got, v.Result)
		}
		v, text = explains(t, root, sc.middle, "c", "tcp", from, to)
		if again := backendOf(t, v, "by hN"); again != want || !strings.Contains(text, "the flow is known") {
			t.Errorf("%s: %+v", from, v)
		}
		seen[want] = true
	}
	if len(seen) != 2 {
		t.Errorf("%s: every flow went to one backend", to)
	}
}

// TestExplainKnownFlow checks that a moving flow waits, that only the owner's answer passes, and a
// packet on another path is explained by its route.
func TestExplainKnownFlow(t *testing.T) {
	sc, root := published(t)
	_, k, owner, other := session(t, sc)
	own, others := fmt.Sprint("h", owner), fmt.Sprint("h", other)
	if v, text := explains(t, root, sc.middle, own, "tcp", service4, k.Client); v.Result != "forwarded to the client, "+k.Client.String() || !strings.Contains(text, fmt.Sprintf("passes if backend number %d sends it", owner)) {
		t.Errorf("%+v\n%s", v, text)
	}
	all, err := Feature{}.Explain(t.Context(), root, feature.Packet{Proto: "tcp", From: service4, To: k.Client, Inode: sc.middle.Inode(), Interface: others})
	if err != nil || len(all) == 0 || all[0].Result != fmt.Sprintf("dropped: the owner, backend number %d, is not at %s", owner, others) {
		t.Errorf("%+v, %v", all, err)
	}
	if v, _ := explains(t, root, sc.middle, "c", "tcp", service4, k.Client); v.Stage != feature.StageForward {
		t.Errorf("%+v", v)
	}
	if v, text := explains(t, root, sc.middle, "lo", "tcp", k.Client, service4); v.Stage != feature.StageForward || v.Result != fmt.Sprintf("backend number %d, by %s", owner, own) || !strings.Contains(text, "weir-lb-buffer is the load balancer's") {
		t.Errorf("%+v", v)
	}
	if v, _ := explains(t, root, sc.middle, "c", "tcp", k.Client, netip.AddrPortFrom(service4.Addr(), 81)); v.Stage != feature.StageForward || v.Result != fmt.Sprintf("dropped: load balancer test has no service at tcp %s:81", service4.Addr()) {
		t.Errorf("%+v", v)
	}
	if _, err := sc.f.Change(k, func(fl *Flow) { fl.Buffering, fl.To = true, other }); err != nil {
		t.Fatal(err)
	}
	if err := sc.f.Buffer(k); err != nil {
		t.Fatal(err)
	}
	if v, text := explains(t, root, sc.middle, "c", "tcp", k.Client, service4); !strings.HasPrefix(v.Result, "buffered at weir-lb-buffer for ") || !strings.Contains(text, fmt.Sprintf("it moves to backend number %d", other)) {
		t.Errorf("%+v", v)
	}
	if err := sc.f.SetBackends([]Backend{}); err != nil {
		t.Fatal(err)
	}
	if v, _ := explains(t, root, sc.middle, "c", "tcp", client(service4, 20000), service4); v.Result != "dropped: no backend gets new flows of service number 0" || !v.Warning {
		t.Errorf("%+v", v)
	}
	if _, err := sc.f.Change(k, func(fl *Flow) { fl.Buffering, fl.Buffered, fl.To = false, false, 0 }); err != nil {
		t.Fatal(err)
	}
	if v, _ := explains(t, root, sc.middle, "c", "tcp", k.Client, service4); v.Result != fmt.Sprintf("dropped: the load balancer has no location of backend number %d", owner) {
		t.Errorf("%+v", v)
	}
}

// TestExplainBySource checks that a service by source is explained by the source at any port, and a
// new load balancer waits.
func TestExplainBySource(t *testing.T) {
	sc, root := published(t)
	for _, s := range []Service{{ID: 5, Listen: flows4, Proto: unix.IPPROTO_UDP, BySource: true}, {ID: 5, Listen: bmp4, Proto: unix.IPPROTO_TCP, BySource: true}} {
		if err := sc.f.SetService(s); err != nil {
			t.Fatal(err)
		}
	}
	listenUDP(t, sc.hosts, flows4)
	sc.f.startupUntil.Store(kernel.Monotonic() + uint64(time.Hour))
	if err := sc.f.configure(); err != nil {
		t.Fatal(err)
	}
	if v, _ := explains(t, root, sc.middle, "c", "tcp", client(bmp4, 20000), bmp4); !strings.HasPrefix(v.Result, "dropped, and the client repeats it") {
		t.Errorf("%+v", v)
	}
	sc.f.startupUntil.Store(0)
	if err := sc.f.configure(); err != nil {
		t.Fatal(err)
	}
	v, _ := explains(t, root, sc.middle, "c", "udp", client(flows4, 20000), flows4)
	want := backendOf(t, v, "by hN")
	if got, err := askUDP(dialUDP(t, sc.client, flows4), "a"); err != nil || got[0] != want {
		t.Errorf("%q, %v, and %s was told", got, err, v.Result)
	}
	v, text := explains(t, root, sc.middle, "c", "tcp", client(bmp4, 20001), bmp4)
	if again := backendOf(t, v, "by hN"); again != want || !strings.Contains(text, "service number 5: the flow is known") {
		t.Errorf("%+v", v)
	}
}

// TestExplainLocalAddress checks the warnings about a local service address, which loses the
// backends' answers, and about a route to another device.
func TestExplainLocalAddress(t *testing.T) {
	sc, root := published(t)
	c, k, owner, _ := session(t, sc)
	local := func(change func(*netlink.Route) error) {
		t.Helper()
		do(t, sc.middle, func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetUp(lo), change(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: &net.IPNet{IP: service4.Addr().AsSlice(), Mask: net.CIDRMask(32, 32)},
				Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST}))
		})
	}
	local(netlink.RouteAdd)
	v, text := explains(t, root, sc.middle, "c", "tcp", k.Client, service4)
	if !strings.Contains(text, "ip route del local 10.55.0.1") || v.Result != fmt.Sprintf("backend number %d, by h%d", owner, owner) {
		t.Errorf("%+v\n%s", v, text)
	}
	silent(t, c, "b")
	local(netlink.RouteDel)
	if got, err := ask(c, "", patience); err != nil || got[0] != byte('0'+owner) {
		t.Errorf("%q, %v", got, err)
	}
	if _, text := explains(t, root, sc.middle, "c", "tcp", k.Client, service4); strings.Contains(text, "ip route") {
		t.Error(text)
	}
	// The agent restores the route within a second, perhaps between these two steps.
	nstest.Eventually(t, func() error {
		do(t, sc.middle, func() error {
			all, err := dump.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{LinkIndex: sc.f.buffer.Ifindex}, netlink.RT_FILTER_OIF)
			for i := range all {
				err = errors.Join(err, netlink.RouteDel(&all[i]))
			}
			return err
		})
		if _, text := explains(t, root, sc.middle, "c", "tcp", k.Client, service4); !strings.Contains(text, "the route to 10.55.0.1 does not lead to weir-lb-buffer") {
			return errors.New(text)
		}
		return nil
	})
}

// TestExplainTunnel checks that a backend behind a tunnel is named by the tunnel's end, and that
// only backends' packets pass out of a tunnel.
func TestExplainTunnel(t *testing.T) {
	sc, root := pinScene(t, newRoutedScene(t, false))
	c, k, owner, _ := session(t, sc)
	defer c.Close()
	v, _ := explains(t, root, sc.middle, "c", "tcp", k.Client, service4)
	if v.Result != fmt.Sprintf("backend number %d, through the tunnel to 10.%d.0.2", owner, 2+owner) {
		t.Errorf("%+v", v)
	}
	v, text := explains(t, root, sc.middle, "weir-tun", "tcp", service4, k.Client)
	if v.Result != "forwarded to the client, "+k.Client.String() || !strings.Contains(text, fmt.Sprintf("passes if backend number %d sends it", owner)) {
		t.Errorf("%+v", v)
	}
	if v, _ := explains(t, root, sc.middle, "weir-tun", "tcp", client(service4, 9), netip.MustParseAddrPort("10.1.0.9:80")); !strings.Contains(v.Text, "others are dropped") {
		t.Errorf("%+v", v)
	}
	do(t, sc.hosts[owner-1], func() error {
		p := feature.Packet{Proto: "tcp", From: k.Client, To: service4, Interface: tunnel.Device}
		all, err := tunnel.Explain(p)
		if err != nil || len(all) != 1 || all[0].Warning || all[0].Text != "weir-tun is the tunnel from the load balancer at 10.2.0.1" {
			t.Errorf("at the backend: %+v, %v", all, err)
		}
		rules, err := netlink.RuleListFiltered(netlink.FAMILY_V4, &netlink.Rule{Table: tunnel.VNI}, netlink.RT_FILTER_TABLE)
		if err != nil || len(rules) != 1 {
			return fmt.Errorf("rules %v, %w", rules, err)
		}
		if err := netlink.RuleDel(&rules[0]); err != nil {
			return err
		}
		all, err = tunnel.Explain(p)
		if err != nil || len(all) != 1 || !all[0].Warning || !strings.Contains(all[0].Text, "the answer leaves by w0, not by the tunnel: ip rule add from 10.55.0.1 lookup 22341") {
			t.Errorf("at the backend, without the rule: %+v, %v", all, err)
		}
		p.Interface = "w0"
		if all, err := tunnel.Explain(p); err != nil || len(all) != 0 {
			t.Errorf("at another device: %+v, %v", all, err)
		}
		return nil
	})
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// Only a packet delivered by the host names a process. Every socket gets a broadcast or multicast packet, and none gets
// a non-local one.
func TestExplainFollowsTheRoute(t *testing.T) {
	nstest.NeedRoot(t)
	w := newWorld(t)
	d := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "r0"}, PeerName: "r1"}
	if err := netlink.LinkAdd(d); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.LinkDel(d) })
	peer, err := netlink.LinkByName("r1")
	if err != nil {
		t.Fatal(err)
	}
	a, _ := netlink.ParseAddr("10.1.0.1/24")
	a6, _ := netlink.ParseAddr("fd00:1::1/64")
	a6.Flags = unix.IFA_F_NODAD
	_, hole, _ := net.ParseCIDR("203.0.113.0/24")
	if err := errors.Join(netlink.LinkSetUp(d), netlink.LinkSetUp(peer), netlink.AddrAdd(d, a), netlink.AddrAdd(d, a6),
		netlink.RouteAdd(&netlink.Route{Dst: hole, Type: unix.RTN_BLACKHOLE})); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/conf/r0/rp_filter", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	pid, _ := daemon(t, "0.0.0.0:4739")
	group := &net.UDPAddr{IP: net.IPv4(239, 1, 1, 1), Port: 4741}
	iface, err := net.InterfaceByName("r0")
	if err != nil {
		t.Fatal(err)
	}
	joined, err := net.ListenMulticastUDP("udp4", iface, group)
	if err != nil {
		t.Fatal(err)
	}
	defer joined.Close()
	w.apply(w.config(damagedService, pid))
	for _, c := range []struct {
		proto, from, to string
		result          string
		pid             bool
	}{
		{"udp", "10.1.0.2:5000", "10.1.0.1:4739", "slot 0: process", true},
		{"udp", "10.1.0.2:5000", "10.99.0.1:4739", "not delivered", false},
		{"tcp", "10.1.0.2:5000", "192.0.2.7:4739", "not delivered", false},
		{"udp", "10.1.0.2:5000", "203.0.113.9:4739", "not delivered", false},
		{"udp", "10.1.0.2:5000", "10.1.0.255:4739", "every socket bound to it: process", false},
		{"udp", "10.1.0.2:5000", "255.255.255.255:4739", "every socket bound to it: process", false},
		{"udp", "10.1.0.2:5000", "10.1.0.255:4740", "dropped: no socket is bound to it", false},
		{"tcp", "10.1.0.2:5000", "10.1.0.255:4739", "TCP accepts no connections to a broadcast address", false},
		{"udp", "10.1.0.2:5000", "239.1.1.1:4741", "every socket bound to it: process", false},
		{"udp", "10.1.0.2:5000", "239.9.9.9:4739", "no socket on this host has joined the group", false},
		{"udp", "198.51.100.1:5000", "10.1.0.1:4739", "reverse path filter", false},
		{"udp", "[fd00:1::2]:5000", "[fd00:1::1]:53", "rejected", false},
		{"udp", "[fd00:1::2]:5000", "[fd00:2::1]:4739", "not delivered", false},
		{"udp", "[fd00:1::2]:5000", "[ff02::1]:4739", "no socket is bound to it", false},
		{"udp", "127.0.0.5:5000", "127.0.0.1:4739", "slot 0: process", true},
	} {
		p, err := feature.ParsePacket(c.proto, c.from, c.to)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(c.from, "127.") {
			p.Interface = "r0"
		}
		x, err := w.Explain(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(x.Result, c.result) || (x.PID != 0) != c.pid {
			t.Errorf("%s %s to %s: %q, process %d; want %q. %+v", c.proto, c.from, c.to, x.Result, x.PID, c.result, x.Steps)
		}
	}
}

// A router forwards packets for other hosts. A local route for delivery would take them from the others.
func TestExplainOnARouter(t *testing.T) {
	nstest.NeedRoot(t)
	w := newWorld(t)
	d := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "r2"}, PeerName: "r3"}
	if err := netlink.LinkAdd(d); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.LinkDel(d) })
	peer, err := netlink.LinkByName("r3")
	if err != nil {
		t.Fatal(err)
	}
	a, _ := netlink.ParseAddr("10.3.0.1/24")
	was, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.WriteFile("/proc/sys/net/ipv4/ip_forward", was, 0) })
	if err := errors.Join(netlink.LinkSetUp(d), netlink.LinkSetUp(peer), netlink.AddrAdd(d, a),
		os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)); err != nil {
		t.Fatal(err)
	}
	p, err := feature.ParsePacket("udp", "10.3.0.2:999", "10.3.0.9:5300")
	if err != nil {
		t.Fatal(err)
	}
	p.Interface = "r2"
	x, err := w.Explain(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(x.Steps, func(s feature.ExplainStep) bool { return s.Step == "route" })
	if i < 0 || !strings.Contains(x.Steps[i].Text, "forwards it by r2") || strings.Contains(x.Steps[i].Text, "ip route add local") {
		t.Errorf("%+v, %q", x.Steps, x.Result)
	}
}

const emptySlots = `
services:
  telemetry:
    listen: [udp 0.0.0.0:4739, udp 0.0.0.0:4740]
    members: [{slot: 0, pid: %d}]
  files:
    listen: [udp 0.0.0.0:4750]
    members: [{slot: 0, pidfile: /nonexistent.pid}]
  unit:
    listen: [udp 0.0.0.0:4751]
    members: [{slot: 0, unit: nowhere@0.service}]
`

// apply, status, explain, doctor and metrics give the same reason for an empty slot.
func TestToldAlikeWhyEmpty(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	done := w.apply(w.config(emptySlots, pid))
	for name, want := range map[string]string{"telemetry": "socket missing: udp4 :4740", "files": "pid file /nonexistent.pid: file does not exist", "unit": "unit nowhere@0.service: "} {
		if s := strings.Join(done, "\n"); !strings.Contains(s, want) {
			t.Errorf("%s: apply says %s", name, s)
		}
		st, err := w.Reader("").Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		steered, _ := Part[state.State](st, spec.Name)
		s, err := steered.Service(name)
		if err != nil {
			t.Fatal(err)
		}
		reason := s.Slots[0].Reason
		if !strings.Contains(reason, want) {
			t.Errorf("%s: status says %q", name, reason)
		}
		if strings.Count(reason, "nowhere@0.service") > 1 || strings.Count(reason, "/nonexistent.pid") > 1 {
			t.Errorf("%s: status names the member twice: %q", name, reason)
		}
		p, err := feature.ParsePacket("udp", "127.0.0.5:5000", map[string]string{"telemetry": "127.0.0.1:4739", "files": "127.0.0.1:4750", "unit": "127.0.0.1:4751"}[name])
		if err != nil {
			t.Fatal(err)
		}
		x, err := w.Explain(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		explained := ""
		for _, s := range x.Steps {
			explained += s.Text + "\n"
		}
		if !strings.Contains(explained, "slot 0 is empty: "+reason) {
			t.Errorf("%s: explain says %s; status %q", name, explained, reason)
		}
		found := false
		for _, f := range w.Doctor(t.Context()).Findings {
			found = found || f.Check == name && f.Text == "slot 0 is empty: "+reason
		}
		if !found {
			t.Errorf("%s: doctor does not say %q", name, reason)
		}
		serving := w.serve()
		_, metrics := serving.get("/metrics")
		if want := `service="` + name + `",slot="0"} 1`; !strings.Contains(metrics, "weir_steer_slot_empty{") || !strings.Contains(metrics, reason) || !strings.Contains(metrics, want) {
			t.Errorf("%s: metrics do not say %q", name, reason)
		}
		serving.stop()
	}
}

// A missing interface is an error, not an answer.
func TestExplainRefusesAbsentInterface(t *testing.T) {
	w := newWorld(t)
	p := feature.Packet{Proto: "udp", From: netip.MustParseAddrPort("127.0.0.1:5"), To: netip.MustParseAddrPort("127.0.0.1:7"), Interface: "absent0"}
	if x, err := w.Explain(t.Context(), p); err == nil || !strings.Contains(err.Error(), "interface absent0 of net:[") {
		t.Errorf("%+v, %v", x, err)
	}
	p.Interface = "lo"
	if _, err := w.Explain(t.Context(), p); err != nil {
		t.Error(err)
	}
}

// wire makes a device with an address in this network namespace. It returns the device and its peer.
func wire(t *testing.T, name, address string) (at, peer netlink.Link) {
	t.Helper()
	d := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}
	if err := netlink.LinkAdd(d); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.LinkDel(d) })
	at, err := netlink.LinkByName(name)
	peer, perr := netlink.LinkByName(name + "p")
	a, aerr := netlink.ParseAddr(address)
	if err := errors.Join(err, perr, aerr); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(netlink.LinkSetUp(at), netlink.LinkSetUp(peer), netlink.AddrAdd(at, a)); err != nil {
		t.Fatal(err)
	}
	return at, peer
}

// forwarding switches IPv4 forwarding of this network namespace.
func forwarding(t *testing.T, on string) {
	t.Helper()
	const key = "/proc/sys/net/ipv4/ip_forward"
	was, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(key, []byte(on), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.WriteFile(key, was, 0) })
}

// explained returns the result and the steps of an explanation as one text.
func (w world) explained(proto, from, to, device string) string {
	w.t.Helper()
	p, err := feature.ParsePacket(proto, from, to)
	if err != nil {
		w.t.Fatal(err)
	}
	p.Interface = device
	x, err := w.Explain(w.t.Context(), p)
	if err != nil {
		w.t.Fatal(err)
	}
	text := "result: " + x.Result + "\n"
	for _, s := range x.Steps {
		text += s.Step + ": " + s.Text + "\n"
	}
	return text
}

// A packet to a service of a load balancer is explained up to its backend, in the order of the programs at the devices.
// Nothing suggests to make the address local.
func TestExplainLoadBalancer(t *testing.T) {
	w := newWorld(t)
	if err := kernel.Require(lb.Needs); err != nil {
		t.Skip("need: kernel", err)
	}
	near, far := wire(t, "b0", "10.3.0.1/24")
	wire(t, "b1", "10.4.0.1/24")
	forwarding(t, "1")
	f, err := lb.Open(t.Context(), w.Root, "test", lb.Options{Devices: []string{"b0"}})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(f.SetService(lb.Service{Listen: netip.MustParseAddrPort("192.0.2.1:1791"), Proto: unix.IPPROTO_TCP}),
		f.SetBackends([]lb.Backend{{Number: 1, Name: "s1", Interface: near.Attrs().Index, MAC: far.Attrs().HardwareAddr, Weight: 1}})); err != nil {
		t.Fatal(err)
	}
	w.apply(w.config("filter: [{name: behind, hook: tcx, interfaces: [b0], rules: [{match: 'tcp.dstport == 1791', action: drop}]}]\n"))
	check := func(from, to, device string, want ...string) {
		t.Helper()
		text := w.explained("tcp", from, to, device)
		for _, s := range want {
			if !strings.Contains(text, s) {
				t.Errorf("%s to %s by %q:\n%swant %q", from, to, device, text, s)
			}
		}
		if strings.Contains(text, "ip route add") {
			t.Errorf("%s to %s by %q:\n%s", from, to, device, text)
		}
	}
	check("10.3.0.2:1000", "192.0.2.1:1791", "", "result: backend number 1, by b0\n", "load balancer test: service number 0: the flow is new")
	check("10.4.0.2:1000", "192.0.2.1:1791", "", "result: backend number 1, by b0\n", "route: 192.0.2.1 is not local: its route leads to weir-lb-buffer\n")
	check("10.3.0.1:1000", "192.0.2.1:1791", "", "result: backend number 1, by b0\n", "arrival: by lo,")
	check("10.3.0.2:1000", "192.0.2.1:80", "", "result: dropped: load balancer test has no service at tcp 192.0.2.1:80\n")
	check("192.0.2.1:1791", "10.4.0.2:1000", "b0", "result: forwarded to the client, 10.4.0.2:1000\n", "an answer of service number 0")
	forwarding(t, "0")
	check("10.4.0.2:1000", "192.0.2.1:1791", "", "result: not delivered: 192.0.2.1 is not local, and the kernel does not forward packets from b1")
	check("10.3.0.2:1000", "192.0.2.1:1791", "", "result: backend number 1, by b0\n")
}

// The route back to a source may depend on the answering address.
func TestExplainArrivalByRule(t *testing.T) {
	w := newWorld(t)
	at, _ := wire(t, "g0", "10.5.0.1/24")
	own, err := netlink.ParseAddr("10.6.0.1/32")
	if err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	r := netlink.NewRule()
	r.Family, r.Table, r.Src = netlink.FAMILY_V4, 77, &net.IPNet{IP: own.IP, Mask: net.CIDRMask(32, 32)}
	_, all, _ := net.ParseCIDR("0.0.0.0/0")
	if err := errors.Join(netlink.AddrAdd(lo, own), netlink.RouteAdd(&netlink.Route{LinkIndex: at.Attrs().Index, Dst: all, Gw: net.IPv4(10, 5, 0, 2), Table: 77}), netlink.RuleAdd(r)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.RuleDel(r); netlink.AddrDel(lo, own) })
	if text := w.explained("udp", "203.0.113.5:9", "10.6.0.1:7", ""); !strings.Contains(text, "arrival: by g0, the interface of the route back to 203.0.113.5") {
		t.Error(text)
	}
}

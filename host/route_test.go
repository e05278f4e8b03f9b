// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// A process is named only for packets that the host delivers: every socket gets what is
// for a broadcast or multicast address, nobody what is not local.
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
		{"tcp", "10.1.0.2:5000", "10.1.0.255:4739", "TCP takes no connections to a broadcast address", false},
		{"udp", "10.1.0.2:5000", "239.1.1.1:4741", "every socket bound to it: process", false},
		{"udp", "10.1.0.2:5000", "239.9.9.9:4739", "nothing on this host has joined the group", false},
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

const emptySlots = `
services:
  telemetry:
    listen: [udp 0.0.0.0:4739, udp 0.0.0.0:4740]
    members: [{slot: 0, pid: %d}]
  files:
    listen: [udp 0.0.0.0:4750]
    members: [{slot: 0, pidfile: /nonexistent.pid}]
`

// Why a slot is empty is told alike by apply, status, explain, doctor and metrics.
func TestToldAlikeWhyEmpty(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	done := w.apply(w.config(emptySlots, pid))
	for name, want := range map[string]string{"telemetry": "socket missing: udp4 :4740", "files": "pid file /nonexistent.pid: file does not exist"} {
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
		p, err := feature.ParsePacket("udp", "127.0.0.5:5000", map[string]string{"telemetry": "127.0.0.1:4739", "files": "127.0.0.1:4750"}[name])
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

// An interface that is not there is a mistake, and no answer.
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

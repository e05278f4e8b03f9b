// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/nstest"
)

// At each hook, Explain predicts the fate of a real packet, without counting.
func TestExplainIsWhatHappens(t *testing.T) {
	eachHook(t, func(t *testing.T, h Hook) {
		w := newWorld(t)
		f := w.filter(h, drops(5001), Rule{Name: "seen", Match: Expression{Text: "udp.dstport == 5002"}, Action: Count},
			Rule{Name: "listed", Match: Expression{Text: "udp.dstport == 5003 and net.src in $few"}, Action: Drop},
			Rule{Name: "magic", Match: Expression{Text: `payload == "` + feature.FramePayload + `" and udp.dstport == 5004`}, Action: Drop},
			Rule{Name: "often", Match: Expression{Text: "udp.dstport == 5005 and rate(net.src) > 1000/s"}, Action: Drop})
		f.Lists = map[string]string{"few": listOf(t, 40, "10.77.0.0/24", "fd77::/64")}
		w.apply(f)
		before := w.one()
		for _, c := range []struct {
			port  uint16
			says  string
			maybe string // the rule with a possibly different verdict on other packets; "": none
		}{{5001, "rule 1 (p5001) drops it", ""}, {5002, "rule 2 (seen) counts it, the default passes it", ""},
			{5003, "rule 3 (listed) drops it", "rule 3 (listed) may"}, {5004, "rule 4 (magic) drops it", "rule 4 (magic) may"},
			{5005, "the default passes it", "rule 5 (often) may"}} {
			for _, way := range [][2]netip.Addr{{w.A4, w.B4}, {w.A6, w.B6}} {
				p := feature.Packet{Proto: "udp", From: netip.AddrPortFrom(way[0], 40000), To: netip.AddrPortFrom(way[1], c.port),
					Inode: w.B.Inode(), Interface: nstest.WireDevice}
				sights, err := Feature{}.Explain(t.Context(), w.root, p)
				if err != nil || len(sights) != 1 {
					t.Fatalf("%s: %+v, %v", p.To, sights, err)
				}
				s := sights[0]
				if !strings.Contains(s.Text, c.says) || !strings.Contains(s.Text, c.maybe) || (c.maybe == "") != !strings.Contains(s.Text, " may ") || s.Warning {
					t.Errorf("%s: got %q, want %q and %q", p.To, s.Text, c.says, c.maybe)
				}
				to := nstest.ListenUDP(t, w.B, p.To)
				from := nstest.ListenUDP(t, w.A, netip.AddrPortFrom(way[0], 0))
				arrived := arrives(t, from, to, feature.FramePayload, s.Result == "")
				if arrived == (s.Result != "") {
					t.Errorf("%s: arrives: %t; explained: %q", p.To, arrived, s.Text)
				}
				to.Close()
			}
		}
		for i, want := range []uint64{2, 2, 2, 2, 0} {
			counted := func() uint64 { return w.one().Rules[i].Packets - before.Rules[i].Packets }
			nstest.Until(t, fmt.Sprintf("rule %d has counted %d packets", i+1, want), func() bool { return counted() >= want })
			if got := counted(); got != want {
				t.Errorf("rule %d counted %d packets, but %d were sent: explanations are counted", i+1, got, want)
			}
		}
	})
}

// Explain returns no verdict of a filter off the packet's path.
func TestExplainElsewhere(t *testing.T) {
	needHook(t, HookTCX)
	w := newWorld(t)
	w.apply(w.filter(HookTCX, drops(5001)))
	p := feature.Packet{Proto: "udp", From: netip.AddrPortFrom(w.A4, 40000), To: netip.AddrPortFrom(w.B4, 5001)}
	for _, c := range []struct {
		inode uint64
		by    string
		want  int
	}{{w.B.Inode(), nstest.WireDevice, 1}, {w.B.Inode(), "lo", 0}, {w.A.Inode(), nstest.WireDevice, 0}} {
		p.Inode, p.Interface = c.inode, c.by
		if s, err := (Feature{}).Explain(t.Context(), w.root, p); err != nil || len(s) != c.want {
			t.Errorf("in %d by %s: %+v, %v", c.inode, c.by, s, err)
		}
	}
	p.Inode, p.Interface = w.B.Inode(), nstest.WireDevice
	out := w.filter(HookTCX, drops(5001))
	out.Direction = Egress
	w.apply(out)
	if s, err := (Feature{}).Explain(t.Context(), w.root, p); err != nil || len(s) > 0 {
		t.Errorf("outgoing packet: %+v, %v", s, err)
	}
}

// arrives sends a datagram and reports its arrival. It waits longer if arrival is expected.
func arrives(t *testing.T, from, to *net.UDPConn, payload string, should bool) bool {
	t.Helper()
	if _, err := from.WriteToUDPAddrPort([]byte(payload), to.LocalAddr().(*net.UDPAddr).AddrPort()); err != nil {
		t.Fatal(err)
	}
	wait := 100 * time.Millisecond
	if should {
		wait = patience
	}
	to.SetReadDeadline(time.Now().Add(wait))
	_, err := to.Read(make([]byte, 64))
	return err == nil
}

// The fields of a rule's expression determine whether it can decide differently for other packets
// with the same addresses and ports.
func TestMayDiffer(t *testing.T) {
	p := feature.Packet{Proto: "udp", From: netip.MustParseAddrPort("10.0.0.1:40000"), To: netip.MustParseAddrPort("10.0.0.2:53")}
	for match, want := range map[string]bool{
		"udp.dstport == 53":                                           false,
		"udp.dstport == 53 and payload contains \"x\"":                true,
		"udp.dstport == 54 and payload contains \"x\"":                false,
		"udp.dstport == 53 or payload contains \"x\"":                 false,
		"udp.dstport == 54 or ip.ttl < 5":                             true,
		"not (udp.dstport == 54 and ip.ttl < 5)":                      false,
		"tcp.flags.syn or ipv6.hlim == 1":                             false,
		"udp.dstport == 53 xor ip.ttl == 1":                           true,
		"net.src in {10.0.0.0/8} xor udp.srcport == 40000":            false,
		"udp.dstport == 54 and rate(net.src) > 5/s":                   false,
		"rate(net.src) > 5/s":                                         true,
		"net.src in $few":                                             true,
		"eth.src == 00:00:00:00:00:00 and udp":                        true,
		"icmp.type == 8 or (gre and udp.dstport == 53) or vlan.id==1": true,
	} {
		if got := (Rule{Match: Expression{Text: match}}).mayDiffer(p); got != want {
			t.Errorf("%s: %t, want %t", match, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"os"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/routers"
)

func TestMain(m *testing.M) { lab.Enter(); nstest.Main(m) }

var realRouter = netip.MustParseAddr("10.100.1.2")

// book returns a ledger for two devices, in slots 0 and 1, and a real router in slot 2. The devices have
// sent to a socket without a reader, and stopped.
func book(t *testing.T) (*ledger, *routers.Fleet) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	to := l.Addr().(*net.TCPAddr).AddrPort()
	udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	f, err := routers.New(routers.Config{Devices: 2, First4: netip.MustParseAddr("127.0.1.1"), First6: netip.IPv6Loopback(), To4: to,
		Rate: 100, Records: 3, Refresh: 20, Retry: time.Second, NS: ns})
	if err != nil {
		t.Fatal(err)
	}
	f.Start(t.Context())
	nstest.Until(t, "both devices have sent both protocols", func() bool {
		return f.Sent(routers.BMP, 0, 1) > 0 && f.Sent(routers.BMP, 1, 1) > 0 && f.Sent(routers.IPFIX, 0, 1) > 0 && f.Sent(routers.IPFIX, 1, 1) > 0
	})
	f.Advance()
	f.Stop()
	led := newLedger(lab.NewResult("x", lab.Smoke, 1), f, []netip.Addr{realRouter})
	for i, a := range led.accounts {
		a.slot = i
	}
	return led, f
}

// honest books all sent records at their right collectors.
func honest(l *ledger, f *routers.Fleet) {
	for i, d := range f.Devices {
		l.book(i, peers.Record{Kind: peers.Flows, Device: d.Addr, Epoch: 1, Count: f.Sent(routers.IPFIX, i, 1)})
		for range f.Sent(routers.BMP, i, 1) {
			l.book(i, peers.Record{Kind: peers.Route, Device: d.Addr, Epoch: 1, Count: 1})
		}
	}
	l.book(2, peers.Record{Kind: peers.Flows, Device: realRouter, Count: 5})
	l.book(2, peers.Record{Kind: peers.Route, Device: realRouter, Count: 1})
}

var allCalm = map[int]bool{0: true, 1: true, 2: true}

// Each possible fault shows in the metric claiming its absence, and in no run without it.
func TestAudit(t *testing.T) {
	flow := func(l *ledger, n int) peers.Record {
		return peers.Record{Kind: peers.Flows, Device: l.accounts[0].addr, Epoch: 1, Count: n}
	}
	for _, c := range []struct {
		name string
		do   func(*ledger)
		calm map[int]bool
		want map[string]float64
	}{
		{"nothing wrong", func(*ledger) {}, allCalm, nil},
		{"a record too many", func(l *ledger) { l.book(0, flow(l, 1)) }, allCalm, map[string]float64{"decode_errors": 1, "miscounted": 1}},
		{"a record too few", func(l *ledger) { l.book(0, flow(l, -1)) }, allCalm, map[string]float64{"decode_errors": 1, "miscounted": 1}},
		{"a record too few of a dead collector", func(l *ledger) { l.book(0, flow(l, -1)) }, map[int]bool{1: true, 2: true}, nil},
		{"a record too many of a dead collector", func(l *ledger) { l.book(0, flow(l, 1)) }, map[int]bool{1: true, 2: true},
			map[string]float64{"decode_errors": 1, "miscounted": 1}},
		{"a record elsewhere", func(l *ledger) { l.book(1, flow(l, 1)) }, allCalm, map[string]float64{"misdirected": 1, "split_devices": 1}},
		{"a session elsewhere", func(l *ledger) { l.book(2, peers.Record{Kind: peers.PeerUp, Device: l.accounts[1].addr, Count: 1}) }, allCalm,
			map[string]float64{"misdirected": 1, "split_devices": 1}},
		{"a real router elsewhere", func(l *ledger) { l.book(0, peers.Record{Kind: peers.Other, Device: realRouter, Count: 1}) }, allCalm,
			map[string]float64{"misdirected": 1, "split_devices": 1}},
		{"an unknown source", func(l *ledger) { l.book(0, peers.Record{Kind: peers.Flows, Device: netip.IPv6Loopback(), Count: 1}) }, allCalm,
			map[string]float64{"decode_errors": 1, "odd_log_lines": 1}},
		{"an odd line", func(l *ledger) { l.book(0, peers.Record{Kind: peers.Odd, Count: 1}) }, allCalm,
			map[string]float64{"decode_errors": 1, "odd_log_lines": 1}},
		{"a crash", func(l *ledger) { l.book(0, peers.Record{Kind: peers.Crashed, Count: 1, Incarnation: 1}) }, allCalm,
			map[string]float64{"decode_errors": 1, "odd_log_lines": 1}},
		{"a crash of a collector with returning routers", func(l *ledger) {
			l.disturb(0)
			l.book(0, peers.Record{Kind: peers.Crashed, Count: 1, Incarnation: 2})
		}, map[int]bool{1: true, 2: true}, map[string]float64{"crashed_starts": 1}},
		{"a gap", func(l *ledger) { l.book(0, peers.Record{Kind: peers.Gap, Device: l.accounts[0].addr, Count: 1}) }, allCalm,
			map[string]float64{"decode_errors": 1, "odd_log_lines": 1}},
		{"a gap of a device with a new collector", func(l *ledger) {
			l.disturb(0)
			l.book(0, peers.Record{Kind: peers.Gap, Device: l.accounts[0].addr, Count: 1})
		}, map[int]bool{1: true, 2: true}, map[string]float64{"gaps_for_templates": 1}},
		{"a gap of a real router", func(l *ledger) { l.book(2, peers.Record{Kind: peers.Gap, Device: realRouter, Count: 1}) }, allCalm,
			map[string]float64{"gaps_for_templates": 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, f := book(t)
			honest(l, f)
			c.do(l)
			got := l.audit([]span{{epoch: 1, calm: c.calm}})
			for _, m := range []string{"decode_errors", "miscounted", "odd_log_lines", "misdirected", "split_devices", "rejected_other_slots", "gaps_for_templates", "crashed_starts"} {
				if got[m] != c.want[m] {
					t.Errorf("%s = %g, want %g", m, got[m], c.want[m])
				}
			}
			if c := l.census(); c["devices"] != 3 || c["protocols"] != 2 || c["real_routers"] != 1 {
				t.Errorf("%v", c)
			}
		})
	}
}

// A rejection counts for the slot of its device, by the state of its collector.
func TestNotice(t *testing.T) {
	l, f := book(t)
	l.disturb(0)
	for _, d := range f.Devices {
		l.notice(routers.Event{Device: d, Kind: routers.Refused, Err: errors.New("refused")})
	}
	l.notice(routers.Event{Device: f.Devices[0], Kind: routers.Lost, Err: errors.New("reset")})
	l.calm(0)
	l.notice(routers.Event{Device: f.Devices[0], Kind: routers.Lost, Err: errors.New("reset")})
	if l.rejected != 2 || l.rejectedDead != 1 || l.lostDead != 1 {
		t.Errorf("%d of live slots, %d and %d of dead ones", l.rejected, l.rejectedDead, l.lostDead)
	}
}

// drain waits for missing records, and not for excess ones.
func TestDrain(t *testing.T) {
	l, f := book(t)
	go func() {
		time.Sleep(100 * time.Millisecond)
		honest(l, f)
	}()
	if err := l.drain(t.Context(), 1, allCalm, time.Minute); err != nil || l.mismatched[1] != 0 {
		t.Errorf("%v, %d devices", err, l.mismatched[1])
	}
	l.book(0, peers.Record{Kind: peers.Flows, Device: f.Devices[0].Addr, Epoch: 1, Count: 1})
	begin := time.Now()
	if err := l.drain(t.Context(), 1, allCalm, time.Minute); err != nil || l.mismatched[1] != 1 || time.Since(begin) > 30*time.Second {
		t.Errorf("%v, %d devices after %s", err, l.mismatched[1], time.Since(begin))
	}
}

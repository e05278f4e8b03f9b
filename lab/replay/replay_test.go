// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

// decoded are the captures with templates and their data, counted by nfacctd, and the BMP streams of its
// version. For others only the path is checked.
var decoded = map[string]bool{
	"netgauze/srv6": true, "pmacct/100": true, "pmacct/101": true, "pmacct/102": true, "pmacct/104": true, "pmacct/106": true,
	"pmacct/400": true, "netgauze/example": true, "pmacct/200": true, "pmacct/201": true, "pmacct/205": true,
}

func isDecoded(name string) bool {
	for prefix := range decoded {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// All UDP payloads and BMP streams of the captures, each from many routers, pass through real collectors
// under weir. All records of one router are at one collector, the one named by weir, and none is missing.
func TestCaptures(t *testing.T) {
	if _, err := os.Stat(captures); err != nil {
		t.Skip("need: captures of real telemetry in", captures, "(TestGenerated uses the lab's own routers)")
	}
	b := newBench(t)
	netflow := b.senders(b.netflow, load(t, "netgauze/", "pmacct/", "telegraf/ipfix", "telegraf/issue", "telegraf/netflow"))
	sflow := b.senders(b.sflow, load(t, "telegraf/sflow"))
	for _, s := range netflow {
		b.streams(s)
	}
	for _, s := range netflow {
		b.datagrams(s, rig.Port)
	}
	for _, s := range sflow {
		b.datagrams(s, sflowPort)
	}
	flows := b.read(b.netflow, alike(netflow))
	t.Logf("%d routers replayed; nfacctd wrote about %d", len(netflow)+len(sflow), len(flows))
	b.judge(netflow, flows)
	b.judge(sflow, b.read(b.sflow, alike(sflow)))
	b.counters(b.netflow, netflow...)
	b.counters(b.sflow, sflow...)
}

// alike reports whether the copies of every device have equal output, and decoded captures have some.
func alike(senders []*sender) func(map[netip.Addr]*seen) bool {
	return func(all map[netip.Addr]*seen) bool {
		first := map[string]seen{}
		for _, s := range senders {
			var v seen
			if w := all[s.addr]; w != nil {
				v = *w
			}
			f, known := first[s.Name]
			if known && (f.flows != v.flows || f.bmp != v.bmp) || isDecoded(s.Name) && (len(s.UDP) > 0 && v.flows == 0 || len(s.Streams) > 0 && v.bmp == 0) {
				return false
			}
			first[s.Name] = v
		}
		return true
	}
}

// judge checks the collectors' output about each router.
func (b *bench) judge(senders []*sender, all map[netip.Addr]*seen) {
	first := map[string]*seen{} // of a device's copies
	for _, s := range senders {
		v := all[s.addr]
		if v == nil {
			v = &seen{}
		}
		for c := range v.at {
			if c != s.slot {
				b.t.Errorf("%s from %s belongs to slot %d and was seen by collector %d", s.Name, s.addr, s.slot, c)
			}
		}
		if isDecoded(s.Name) {
			if len(s.UDP) > 0 && v.flows == 0 {
				b.t.Errorf("%s from %s: no flow was counted", s.Name, s.addr)
			}
			if len(s.Streams) > 0 && v.bmp == 0 {
				b.t.Errorf("%s from %s: no BMP message was logged", s.Name, s.addr)
			}
		}
		if f := first[s.Name]; f == nil {
			first[s.Name] = v
		} else if f.flows != v.flows || f.bmp != v.bmp {
			b.t.Errorf("%s from %s: %d flows and %d BMP messages, but %d and %d from another address", s.Name, s.addr, v.flows, v.bmp, f.flows, f.bmp)
		}
		delete(all, s.addr)
	}
	for a := range all {
		b.t.Errorf("output about %s, not a sender", a)
	}
}

// The lab's own routers, over both families, need no captures.
func TestGenerated(t *testing.T) {
	b := newBench(t)
	now := time.Now()
	var devices []Device
	for i, source := range []string{"10.0.0.1", "2001:db8::1"} {
		a := netip.MustParseAddr(source)
		d := routers.NewDevice(i, a)
		stream := d.PeerUp(d.Initiation(nil), 1, now)
		out := Device{Name: "generated " + source, Source: a}
		for n := range uint32(50) {
			out.UDP = append(out.UDP, d.IPFIX(nil, n*4, n%10 == 0, 4, 7, now))
			stream = d.RouteMonitoring(stream, n, 7, now)
		}
		out.Streams = [][]byte{d.Statistics(stream, 50, now)}
		devices = append(devices, out)
	}
	senders := b.senders(b.netflow, devices)
	for _, s := range senders {
		b.streams(s)
	}
	for _, s := range senders {
		b.datagrams(s, rig.Port)
	}
	all := b.read(b.netflow, func(all map[netip.Addr]*seen) bool {
		for _, s := range senders {
			if v := all[s.addr]; v == nil || v.flows < 200 {
				return false
			}
		}
		return alike(senders)(all)
	})
	for _, s := range senders {
		if v := all[s.addr]; v == nil || v.flows != 200 {
			t.Errorf("%s from %s: %+v, want 200 flows", s.Name, s.addr, v)
		}
	}
	b.judge(senders, all)
	b.counters(b.netflow, senders...)
}

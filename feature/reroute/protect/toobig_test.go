// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/feature/reroute/protect/srv6"
)

// A link farther along the repair has a smaller MTU. The router's report is logged and learnt. The sender is then
// told, and fitting packets arrive. The size expires later.
func TestTooBigOnTheWay(t *testing.T) {
	was := keepSize
	defer func() { keepSize = was }()
	w := newWorld(t)
	w.ip(w.r3, "link set r2 mtu 1400")
	w.ip(w.r2, "link set back mtu 1400")
	w.apply(w.path(around()))
	log := &heardLog{testLog: testLog{t}}
	stop := w.serveTo(log)
	w.drain(true)
	full := w.state("core").Repairs[0]
	if full.Learnt || full.MTU != 1500 {
		t.Fatalf("before anything is learnt: %+v", full)
	}
	p := w.pair(true)
	if p.arrives(1352, time.Second) { // 1,400 bytes with the outer headers
		t.Fatal("the link of 1,400 bytes takes more")
	}
	w.until("the size is learnt", func() bool { // the first packet's report may be missed
		p.arrives(1352, 10*time.Millisecond)
		return w.state("core").Repairs[0].Learnt
	})
	if r := w.state("core").Repairs[0]; r.MTU != 1400 || r.Fits != full.Fits-100 {
		t.Errorf("learnt %+v, of %+v", r, full)
	}
	log.mu.Lock()
	if all := strings.Join(log.lines, "\n"); !strings.Contains(all, "too big for a link on the way") || !strings.Contains(all, "1400") || !strings.Contains(all, "core") {
		t.Errorf("said %s", all)
	}
	log.mu.Unlock()
	w.until("the sender is told", func() bool { p.arrives(1352, 10*time.Millisecond); return p.mtu(t) == 1400-int(full.MTU-full.Fits) })
	if !p.arrives(p.mtu(t)-48, patience) {
		t.Error("what fits does not arrive")
	}
	four := w.pair(false)
	four.discover(t, unix.IP_PMTUDISC_DO)
	w.until("a sender of IPv4 packets is told", func() bool { four.arrives(1372, 10*time.Millisecond); return four.mtu(t) < 1400 })
	if !four.arrives(four.mtu(t)-28, patience) {
		t.Error("an IPv4 packet that fits does not arrive")
	}
	w.apply(w.path(around()), Path{Name: "more", Netns: netnsName(w.r1), Device: "in", Repairs: []Repair{{Device: "back", Via: addrs("fd00:13::3")[0]}}})
	if r := w.state("core").Repairs[0]; r.MTU != 1400 || !r.Learnt {
		t.Errorf("another path was added, and the size is %+v", r)
	}
	stop()
	keepSize = 100 * time.Millisecond
	w.serveTo(log)
	w.until("the full size is tried again", func() bool { return w.state("core").Repairs[0] == full })
}

// The size of a way is learnt from messages only a router on it can send, and never below IPv6's minimum. Others are
// ignored.
func TestLearnsSizes(t *testing.T) {
	source, segments := netip.MustParseAddr("fc00:1::1"), addrs("fc00:3::e", "fc00:4::e", "fc00:2::d6")
	r := bpf.ProtectRerouteRepair{Ifindex: 7, Mtu: 1500, Flags: flagFor6 | flagFor4}
	var length int
	r.Header6, length = srv6.Encap(source, segments, srv6.NextIPv6)
	r.Len6 = uint32(length)
	r.Header4, length = srv6.Encap(source, addrs("fc00:2::d4"), srv6.NextIPv4)
	r.Len4 = uint32(length)
	// message is a router's report of a 1,500-byte packet with these headers, at the segment with left segments
	// remaining.
	message := func(mtu uint32, header []byte, to netip.Addr, left byte) []byte {
		b := make([]byte, icmp6HeaderLen, 1280)
		b[0] = icmp6TooBig
		binary.BigEndian.PutUint32(b[4:], mtu)
		b = append(b, header...)
		b = append(b, make([]byte, 1000)...)
		quoted := b[icmp6HeaderLen:]
		binary.BigEndian.PutUint16(quoted[4:], 1460)
		copy(quoted[24:], to.AsSlice())
		if quoted[6] == srv6.NextRouting {
			quoted[srv6.IPv6Length+3] = left
		}
		return b
	}
	six, four := r.Header6[:r.Len6], r.Header4[:r.Len4]
	other, _ := srv6.Encap(source, addrs("fc00:3::e", "fc00:5::e", "fc00:2::d6"), srv6.NextIPv6)
	stolen, _ := srv6.Encap(netip.MustParseAddr("fc00:9::1"), segments, srv6.NextIPv6)
	bare, _ := srv6.Encap(source, segments[2:], srv6.NextIPv6)
	const floor = 1280 + 40 + 8 + 2*16
	for name, x := range map[string]struct {
		message []byte
		change  func(b []byte)
		repair  func(r *bpf.ProtectRerouteRepair)
		want    uint32 // 0: nothing is learnt
	}{
		"on the way to the first segment":  {message: message(1400, six, segments[0], 2), want: 1400},
		"to the second":                    {message: message(1400, six, segments[1], 1), want: 1400},
		"to the last":                      {message: message(1400, six, segments[2], 0), want: 1400},
		"without the routing header":       {message: message(1400, bare[:srv6.IPv6Length], segments[2], 0), want: 1400},
		"of IPv4":                          {message: message(1400, four, netip.MustParseAddr("fc00:2::d4"), 0), want: 1400},
		"less than IPv6 needs":             {message: message(1280, six, segments[0], 2), want: floor},
		"less than any link":               {message: message(600, six, segments[0], 2)},
		"no less than is known":            {message: message(1500, six, segments[0], 2)},
		"another's source":                 {message: message(1400, stolen[:r.Len6], segments[0], 2)},
		"another segment":                  {message: message(1400, other[:r.Len6], segments[0], 2)},
		"another destination":              {message: message(1400, six, netip.MustParseAddr("fc00:7::1"), 2)},
		"not the segment that is left":     {message: message(1400, six, segments[0], 1)},
		"more left than there are":         {message: message(1400, six, segments[0], 3)},
		"a segment without the others":     {message: message(1400, bare[:srv6.IPv6Length], segments[0], 0)},
		"a routing header that is cut off": {message: message(1400, six, segments[0], 2)[:icmp6HeaderLen+srv6.IPv6Length+20]},
		"a packet that would have fit":     {message: message(1400, six, segments[0], 2), change: func(b []byte) { b[icmp6HeaderLen+4], b[icmp6HeaderLen+5] = 0, 200 }},
		"a packet that was never sent":     {message: message(1400, six, segments[0], 2), change: func(b []byte) { b[icmp6HeaderLen+4] = 30 }},
		"a link in use":                    {message: message(1400, six, segments[0], 2), repair: func(r *bpf.ProtectRerouteRepair) { r.Slot = 2 }},
		"a shadow":                         {message: message(1400, six, segments[0], 2), repair: func(r *bpf.ProtectRerouteRepair) { r.Flags |= flagShadow }},
		"inline, of a sender's own":        {message: message(1400, six, segments[0], 2), repair: func(r *bpf.ProtectRerouteRepair) { r.Flags |= flagInline }},
	} {
		t.Run(name, func(t *testing.T) {
			r := r
			r.Slot, r.Row = 1, 1
			if x.repair != nil {
				x.repair(&r)
			}
			if x.change != nil {
				x.change(x.message)
			}
			w := &watcher{log: testLog{t}, words: make(links.Words, 3*links.StateSize), memory: memory{sizes: map[wayKey]learntSize{}}}
			w.words.Set(1, links.DrainByte, true)
			w.Paths = []published{{Path: Path{Name: "core"}, Row: 1}}
			w.repairs.Store(&map[uint32]bpf.ProtectRerouteRepair{1: r})
			if m, ok := parseTooBig(x.message); ok {
				w.learn(m)
			}
			if got := w.sizes[newWayKey(&r)].mtu; got != x.want {
				t.Errorf("learnt %d, want %d", got, x.want)
			}
			routes := []route{{ways: []way{{ProtectRerouteRepair: r}}}}
			shrink(routes, w.knownSizes())
			if got := routes[0].ways[0].Mtu; x.want != 0 && got != x.want || x.want == 0 && got != 1500 {
				t.Errorf("the way takes %d", got)
			}
		})
	}
}

func FuzzTooBig(f *testing.F) {
	source, segments := netip.MustParseAddr("fc00:1::1"), addrs("fc00:3::e", "fc00:4::e", "fc00:2::d6")
	r := bpf.ProtectRerouteRepair{Mtu: 1500}
	header, length := srv6.Encap(source, segments, srv6.NextIPv6)
	r.Header6, r.Len6 = header, uint32(length)
	good := append([]byte{icmp6TooBig, 0, 0, 0, 0, 0, 1400 >> 8, 1400 & 0xff}, header[:length]...)
	binary.BigEndian.PutUint16(good[icmp6HeaderLen+4:], 1460)
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		m, ok := parseTooBig(b)
		if !ok || !m.about(&r) {
			return
		}
		if from := netip.AddrFrom16([16]byte(m.quoted[8:24])); from != source || m.length <= m.mtu || m.length > r.Mtu {
			t.Errorf("a packet from %s of %d bytes is taken for one of the repair", from, m.length)
		}
	})
}

// Malformed and unrelated messages are rejected.
func TestParseTooBig(t *testing.T) {
	good := make([]byte, icmp6HeaderLen+ip6HeaderLen)
	good[0], good[6], good[7] = icmp6TooBig, 1400>>8, 1400&0xff
	good[icmp6HeaderLen], good[icmp6HeaderLen+6] = 0x60, 43
	if m, ok := parseTooBig(good); !ok || m.mtu != 1400 {
		t.Errorf("%+v, %t", m, ok)
	}
	for what, change := range map[string]func(b []byte) []byte{
		"cut":             func(b []byte) []byte { return b[:len(b)-1] },
		"empty":           func([]byte) []byte { return nil },
		"another message": func(b []byte) []byte { b[0] = 3; return b },
		"quotes TCP":      func(b []byte) []byte { b[icmp6HeaderLen+6] = 6; return b },
		"quotes IPv4":     func(b []byte) []byte { b[icmp6HeaderLen] = 0x45; return b },
		"less than IPv6":  func(b []byte) []byte { b[6], b[7] = 0, 100; return b },
		"more than any":   func(b []byte) []byte { b[4] = 1; return b },
	} {
		if m, ok := parseTooBig(change(append([]byte(nil), good...))); ok {
			t.Errorf("%s: read as %+v", what, m)
		}
	}
}

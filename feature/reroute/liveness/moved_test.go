// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"bytes"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// The source of a probe is accepted if the probe is signed and newer than all before. Other frames are ignored.
func TestMovedNeighbour(t *testing.T) {
	old, other := [6]uint8{2, 0, 0, 0, 0, 1}, [6]uint8{2, 0, 0, 0, 0, 9}
	changed := func(change func(f *bpf.LivenessLivenessFrame)) func(*bench) []byte {
		return func(b *bench) []byte {
			f := b.frame(101, 0)
			f.Srh.SegmentsLeft, f.Ip.Daddr = 1, f.Seg[1]
			change(f)
			return b.sign(f)
		}
	}
	from := func(mac [6]uint8, data func(*bench) []byte) func(*bench) []byte {
		return func(b *bench) []byte { d := data(b); copy(d[6:], mac[:]); return d }
	}
	next := changed(func(*bpf.LivenessLivenessFrame) {})
	for _, c := range []struct {
		name  string
		data  func(*bench) []byte
		moved uint32
	}{
		{"the next probe", from(other, next), 1},
		{"of a later life", from(other, changed(func(f *bpf.LivenessLivenessFrame) { f.Tlv.Life, f.Tlv.Seq = network64(78), network32(1) })), 1},
		{"from where the kernel sends to", from(old, next), 0},
		{"from a multicast address", from([6]uint8{3}, next), 0},
		{"recorded", from(other, changed(func(f *bpf.LivenessLivenessFrame) { f.Tlv.Seq = network32(100) })), 0},
		{"recorded long ago", from(other, changed(func(f *bpf.LivenessLivenessFrame) { f.Tlv.Life, f.Tlv.Seq = network64(76), network32(500) })), 0},
		{"another key", from(other, func(b *bench) []byte { o := *b; o.key[0]++; return next(&o) }), 0},
		{"no tag", from(other, func(b *bench) []byte { d := next(b); copy(d[len(d)-8:], make([]byte, 8)); return d }), 0},
		{"from farther away", from(other, changed(func(f *bpf.LivenessLivenessFrame) { f.Ip.HopLimit = 254 })), 0},
		{"an answer", from(other, changed(func(f *bpf.LivenessLivenessFrame) { f.Tlv.Kind = 1 })), 0},
		{"our own, reflected", from(other, func(b *bench) []byte { f := b.s.setup(location{}, b.key, b.life).Frame; return b.sign(&f) }), 0},
		{"of another session", from(other, changed(func(f *bpf.LivenessLivenessFrame) { f.Tlv.Session = network32(8) })), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			s := b.state()
			copy(s.Mac[:], old[:])
			s.MacKnown, s.PeerLife, s.PeerSeq = 1, 77, 100
			if err := b.maps[pinStates].Put(uint32(0), s); err != nil {
				t.Fatal(err)
			}
			b.run(bpf.LivenessProgLivenessReturn, c.data(b))
			v, err := readMove(b.maps[pinMoves], 0)
			if err != nil || v.Moved != c.moved || c.moved == 1 && (v.Was != old || v.Now != other) {
				t.Errorf("%+v, %v", v, err)
			}
			if now := b.state(); now.Heard != s.Heard || now.PeerSeq != s.PeerSeq || now.PeerLife != s.PeerLife {
				t.Error("it is counted before the segment counts it")
			}
			if c.moved == 1 { // back again before the kernel's update
				b.run(bpf.LivenessProgLivenessReturn, from(old, changed(func(f *bpf.LivenessLivenessFrame) { f.Tlv.Life, f.Tlv.Seq = network64(78), network32(2) }))(b))
				if v, err := readMove(b.maps[pinMoves], 0); err != nil || v.Moved != 0 {
					t.Errorf("moved back: %+v, %v", v, err)
				}
			}
		})
	}
}

// A neighbour with a new link address is up again without any process, even if the kernel has a permanent entry with
// the old address. The next command updates the entry.
func TestNeighbourMoves(t *testing.T) {
	p := newPair(t)
	a, b := p.sessions(10 * time.Millisecond)
	p.apply(p.w.NameA, a)
	p.apply(p.w.NameB, b)
	p.within(patience, "up", bothUp)
	entry := func() *netlink.Neigh {
		t.Helper()
		var out *netlink.Neigh
		inside(t, p.w.A, func() error {
			all, err := dump.NeighList(nstest.Ifindex(t, p.w.A, nstest.WireDevice), netlink.FAMILY_V6)
			for _, n := range all {
				if n.IP.Equal(net.IP(p.w.B6.AsSlice())) {
					out = &n
				}
			}
			return err
		})
		return out
	}
	n := entry()
	if n == nil {
		t.Fatal("the neighbour is not known")
	}
	n.State = netlink.NUD_PERMANENT
	inside(t, p.w.A, func() error {
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: n.LinkIndex, Family: netlink.FAMILY_V6, State: n.State, IP: n.IP, HardwareAddr: n.HardwareAddr})
	})
	for i, now := range []net.HardwareAddr{{2, 0, 0, 0, 0, 0x99}, {2, 0, 0, 0, 0, 0x98}, n.HardwareAddr} {
		flaps := p.state().session("to-b").Flaps
		setAddress(t, p.w.B, now)
		p.within(patience, "down", func(a, _ SessionState) bool { return a.Flaps > flaps })
		p.within(patience, "up again", bothUp)
		p.words(0)
		if e := entry(); e == nil || !bytes.Equal(e.HardwareAddr, n.HardwareAddr) || e.State&netlink.NUD_PERMANENT == 0 {
			t.Fatalf("move %d: the kernel's entry became %v", i+1, e)
		}
	}
	now := net.HardwareAddr{2, 0, 0, 0, 0, 0x97}
	setAddress(t, p.w.B, now)
	index := nstest.Ifindex(t, p.w.A, nstest.WireDevice)
	nstest.Eventually(t, func() error {
		o, err := p.root.Open(instance(netnsScope(p.w.A)), pinMoves)
		if err != nil {
			t.Fatal(err)
		}
		v, err := readMove(o.Maps[pinMoves], index)
		o.Close()
		if err != nil {
			t.Fatal(err)
		}
		if v.Moved == 0 || !bytes.Equal(v.Now[:], now) {
			return fmt.Errorf("the move is %+v, want it to %s", v, now)
		}
		return nil
	})
	l := p.lock()
	err := Recover(l)
	l.Unlock()
	if e := entry(); err != nil || e == nil || !bytes.Equal(e.HardwareAddr, now) || e.State&netlink.NUD_PERMANENT == 0 {
		t.Errorf("the kernel's entry is %v, %v", e, err)
	}
	p.within(patience, "up with the kernel's entry", bothUp)
}

func setAddress(t *testing.T, ns *netns.Handle, to net.HardwareAddr) {
	t.Helper()
	inside(t, ns, func() error {
		d, err := netlink.LinkByName(nstest.WireDevice)
		if err != nil {
			return err
		}
		return netlink.LinkSetHardwareAddr(d, to)
	})
}

// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/feature/reroute/protect/srv6"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// Return values of programs: linux/pkt_cls.h.
const (
	actNext     = 0xffffffff
	actDrop     = 2
	actRedirect = 7
)

// loopback is the device of packets in test runs.
const loopback = 1

// skb is the part of struct __sk_buff (linux/bpf.h) read by test runs.
type skb struct {
	Len, PktType, Mark, Queue, Protocol, VlanPresent, VlanTCI, VlanProto, Priority, IngressIfindex, Ifindex, TCIndex uint32
	CB                                                                                                               [5]uint32
	Hash, TCClassid, Data, DataEnd, NAPI, Family, RemoteIP4, LocalIP4                                                uint32
	RemoteIP6, LocalIP6                                                                                              [4]uint32
	RemotePort, LocalPort, DataMeta                                                                                  uint32
	Flow, Tstamp                                                                                                     uint64
	WireLen, GSOSegs                                                                                                 uint32
	SK                                                                                                               uint64
	GSOSize, Pad                                                                                                     uint32
	HWTstamp                                                                                                         uint64
}

// ipv6 returns an Ethernet frame with UDP over IPv6, from fd00:a::2.
func ipv6(to string, dport uint16, hops uint8, payload int) []byte {
	b := make([]byte, 14+40+8+payload)
	b[12], b[13], b[14], b[20], b[21] = 0x86, 0xdd, 0x60, unix.IPPROTO_UDP, hops
	binary.BigEndian.PutUint16(b[18:], uint16(8+payload))
	copy(b[22:], addrs("fd00:a::2")[0].AsSlice())
	copy(b[38:], addrs(to)[0].AsSlice())
	binary.BigEndian.PutUint16(b[54:], 4000)
	binary.BigEndian.PutUint16(b[56:], dport)
	binary.BigEndian.PutUint16(b[58:], uint16(8+payload))
	return b
}

// TestProgram runs the egress program and checks its return value and its packet.
func TestProgram(t *testing.T) {
	nstest.NeedRoot(t)
	if err := probe.RedirectNeigh.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
	source, segments := addrs("fc00:1::1")[0], addrs("fc00:3::e", "fc00:2::d6")
	repair := bpf.ProtectRerouteRepair{Ifindex: loopback, Slot: loopback, Watch: 7, Row: 1, Flags: flagFor4 | flagFor6, Mtu: 1500}
	n := 0
	repair.Header6, n = srv6.Encap(source, segments, srv6.NextIPv6)
	repair.Len6 = uint32(n)
	repair.Header4, n = srv6.Encap(source, segments[1:], srv6.NextIPv4)
	repair.Len4 = uint32(n)
	inline := repair
	inline.Header6, n = srv6.Inline(segments[:1])
	inline.Len6, inline.Flags = uint32(n), repair.Flags|flagInline
	shadow, only4, second := repair, repair, repair
	shadow.Flags |= flagShadow
	only4.Flags = flagFor4
	second.Next = 2
	frame := ipv6("fd00:d::2", 53, 63, 20)
	v4, _ := hex.DecodeString("0000000000000000000000000800" + "45b8001c000000003f110000" + "0a010002" + "0a040002" + "0fa0003500080000")
	// The outer headers of the frame. The length is one segment's routing header plus the frame. Flow labels are 0
	// here.
	outer6 := "60000000005c" + "2b40" + text(source.AsSlice()) + text(segments[0].AsSlice()) + "2902040100000000" + text(segments[1].AsSlice())
	outer4 := "6b800000001c" + "0440" + text(source.AsSlice()) + text(segments[1].AsSlice())
	final := addrs("fd00:d::2")[0]
	own := text(frame[14:18]) + "0034" + "2b3f" + text(frame[22:38]) + text(segments[0].AsSlice()) + "1102040100000000" + text(final.AsSlice())

	for name, c := range map[string]struct {
		repairs []bpf.ProtectRerouteRepair
		words   map[uint32]links.State
		in      []byte
		mark    uint32
		ret     uint32
		out     string // hexadecimal, after the Ethernet header; empty: unchanged
		count   string // of path 1
	}{
		"up":                     {repairs: []bpf.ProtectRerouteRepair{repair}, in: frame, ret: actNext},
		"probe":                  {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}}, in: frame, ret: actRedirect, out: outer6 + text(frame[14:]), count: "packets 1"},
		"carrier":                {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {0, 1}}, in: frame, ret: actRedirect, out: outer6 + text(frame[14:]), count: "packets 1"},
		"drain":                  {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {0, 0, 1}}, in: frame, ret: actRedirect, out: outer6 + text(frame[14:]), count: "packets 1"},
		"another link is down":   {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{2: {1}}, in: frame, ret: actNext},
		"nothing is configured":  {words: map[uint32]links.State{1: {1}}, in: frame, ret: actNext},
		"IPv4, traffic class":    {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}}, in: v4, ret: actRedirect, out: outer4 + text(v4[14:]), count: "packets 1"},
		"inline":                 {repairs: []bpf.ProtectRerouteRepair{inline}, words: map[uint32]links.State{1: {1}}, in: frame, ret: actRedirect, out: own + text(frame[54:]), count: "packets 1"},
		"shadow":                 {repairs: []bpf.ProtectRerouteRepair{shadow}, words: map[uint32]links.State{1: {1}}, in: frame, ret: actNext, count: "shadow 1"},
		"shadow, no way left":    {repairs: []bpf.ProtectRerouteRepair{shadow}, words: map[uint32]links.State{1: {1}, 7: {0, 1}}, in: frame, ret: actNext, count: "shadow 1"},
		"not for its protocol":   {repairs: []bpf.ProtectRerouteRepair{only4}, words: map[uint32]links.State{1: {1}}, in: frame, ret: actNext, count: "none 1"},
		"the backup is down":     {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}, 7: {0, 1}}, in: frame, ret: actDrop, count: "stuck 1"},
		"the second is taken":    {repairs: []bpf.ProtectRerouteRepair{second, inline8(inline)}, words: map[uint32]links.State{1: {1}, 7: {0, 1}}, in: frame, ret: actRedirect, out: own + text(frame[54:]), count: "packets 1, next 1"},
		"too big, nobody to say": {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}}, in: ipv6("fd00:d::2", 53, 63, 1400), ret: actDrop, count: "lost 1"},
		"just fits":              {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}}, in: ipv6("fd00:d::2", 53, 63, 1436-48), ret: actRedirect, count: "packets 1", out: "-"},
		"multicast":              {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}}, in: ipv6("ff02::5", 53, 63, 4), ret: actNext, count: "exempt 1"},
		"link-local":             {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}}, in: ipv6("fe80::5", 53, 63, 4), ret: actNext, count: "exempt 1"},
		"BFD":                    {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}}, in: ipv6("fd00:d::2", 3784, 255, 4), ret: actNext, count: "exempt 1"},
		"BFD over several hops":  {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}}, in: ipv6("fd00:d::2", 3784, 63, 4), ret: actRedirect, count: "packets 1", out: "-"},
		"a probe":                {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}}, in: frame, mark: links.Mark, ret: actNext, count: "exempt 1"},
		"ARP":                    {repairs: []bpf.ProtectRerouteRepair{repair}, words: map[uint32]links.State{1: {1}}, in: append(append(make([]byte, 12), 8, 6), make([]byte, 46)...), ret: actNext},
	} {
		t.Run(name, func(t *testing.T) {
			spec, err := bpf.LoadProtect()
			if err != nil {
				t.Fatal(err)
			}
			k, err := kernel.Load(spec, []string{bpf.ProtectProgRerouteEgress}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer k.Close()
			for i, r := range c.repairs {
				put(t, k, bpf.ProtectMapRerouteRepairs, uint32(i+1), r)
				put(t, k, bpf.ProtectMapReroutePaths, loopback, bpf.ProtectReroutePath{Ifindex: loopback, Repair: 1})
			}
			for slot, w := range c.words {
				put(t, k, bpf.ProtectMapRerouteLinks, slot, w)
			}
			out := make([]byte, 2000)
			o := &ebpf.RunOptions{Data: c.in, DataOut: out, Context: skb{Mark: c.mark, Ifindex: loopback}}
			ret, err := k.Programs[bpf.ProtectProgRerouteEgress].Run(o)
			if err != nil {
				t.Fatal(err)
			}
			if ret != c.ret {
				t.Errorf("returned %#x, want %#x", ret, c.ret)
			}
			got := o.DataOut[14:]
			if c.out != "" && c.out != "-" {
				compare(t, got, c.out)
			} else if c.out == "" && !bytes.Equal(o.DataOut, c.in) {
				t.Errorf("the packet changed: %x", o.DataOut)
			}
			sum, err := readCounts(k.Maps[bpf.ProtectMapRerouteCounts], 1)
			if err != nil {
				t.Fatal(err)
			}
			if said := counted(sum); said != c.count {
				t.Errorf("counted %q, want %q", said, c.count)
			}
		})
	}
}

// inline8 is a repair with another backup.
func inline8(r bpf.ProtectRerouteRepair) bpf.ProtectRerouteRepair {
	r.Watch = 8
	return r
}

func put(t *testing.T, k *kernel.Collection, m string, key uint32, v any) {
	t.Helper()
	if err := k.Maps[m].Put(key, v); err != nil {
		t.Fatal(err)
	}
}

func text(b []byte) string { return hex.EncodeToString(b) }

// compare compares a packet with the wanted one. An outer flow label only has to exist.
func compare(t *testing.T, got []byte, want string) {
	t.Helper()
	w, err := hex.DecodeString(want)
	if err != nil {
		t.Fatal(err)
	}
	g := bytes.Clone(got)
	if len(g) > 4 && len(w) > 4 && w[6] != srv6.NextRouting || len(w) > 40 && w[40] == srv6.NextIPv6 {
		if g[1]&15|g[2]|g[3] == 0 {
			t.Error("no flow label")
		}
		g[1], g[2], g[3] = g[1]&0xf0, 0, 0
	}
	if !bytes.Equal(g, w) {
		t.Errorf("got\n%x, want\n%x", g, w)
	}
}

func counted(c Counts) string {
	var out []string
	for _, x := range []struct {
		name string
		n    uint64
	}{{"packets", c.Packets}, {"next", c.Next}, {"shadow", c.Shadow}, {"exempt", c.Exempt}, {"big", c.Big}, {"lost", c.Lost}, {"none", c.None}, {"stuck", c.Stuck}, {"odd", c.Odd}} {
		if x.n > 0 {
			out = append(out, fmt.Sprint(x.name, " ", x.n))
		}
	}
	return strings.Join(out, ", ")
}

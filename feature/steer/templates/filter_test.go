// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/ipfix/ipfixtest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// loadFilter loads the filter for port 4739.
func loadFilter(t testing.TB) *kernel.Collection {
	t.Helper()
	nstest.NeedRoot(t)
	spec, err := bpf.LoadTemplates()
	if err != nil {
		t.Fatal(err)
	}
	c, err := kernel.Load(spec, []string{bpf.TemplatesProgTemplatesFilter}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if err := c.Maps[bpf.TemplatesMapTemplatesPorts].Put(uint16(4739), bpf.TemplatesPort{}); err != nil {
		t.Fatal(err)
	}
	return c
}

// framed returns an Ethernet frame of a datagram without the mark of a replay.
func framed(from, to netip.AddrPort, payload []byte) []byte {
	p := udpPacket(from, to, payload)
	ethertype := []byte{8, 0}
	if from.Addr().Is6() {
		p[3]++ // another flow label
		ethertype = []byte{0x86, 0xdd}
	} else {
		p[5]++ // another identification
	}
	return append(append(make([]byte, 12), ethertype...), p...)
}

func TestTemplateFilter(t *testing.T) {
	c := loadFilter(t)
	from4, to4 := netip.MustParseAddrPort("192.0.2.7:50000"), netip.MustParseAddrPort("10.0.0.1:4739")
	from6, to6 := netip.MustParseAddrPort("[2001:db8::7]:50000"), netip.MustParseAddrPort("[2001:db8::1]:4739")
	h9, h10 := ipfix.Header{Version: ipfix.NetFlow9, Domain: 3, Sequence: 9, Uptime: 5}, ipfix.Header{Version: ipfix.IPFIX, Domain: 3, Sequence: 8, ExportTime: 77}
	e9, e10 := ipfixtest.Templates(ipfix.NetFlow9), ipfixtest.Templates(ipfix.IPFIX)
	with := func(b []byte, f func([]byte)) []byte { f(b); return b }
	many := func(n int) (sets [][]byte) {
		for range n {
			sets = append(sets, ipfixtest.Set(300, 0, 0, 0, 0))
		}
		return append(sets, ipfixtest.Set(2, ipfixtest.Record...))
	}
	for _, x := range []struct {
		name  string
		frame []byte
		want  bool
	}{
		{"ipfix", framed(from4, to4, ipfixtest.Message(h10, ipfixtest.Set(2, ipfixtest.Record...))), true},
		{"netflow9 over IPv6", framed(from6, to6, ipfixtest.Message(h9, ipfixtest.Set(0, ipfixtest.Record...))), true},
		{"options", framed(from4, to4, ipfixtest.Message(h10, ipfixtest.Set(3, e10[1].Record...))), true},
		{"options of netflow9", framed(from4, to4, ipfixtest.Message(h9, ipfixtest.Set(1, e9[1].Record...))), true},
		{"behind data", framed(from4, to4, ipfixtest.Message(h10, many(60)...)), true},
		{"behind more sets than are looked at", framed(from4, to4, ipfixtest.Message(h10, many(64)...)), false},
		{"data", framed(from4, to4, ipfixtest.Message(h10, ipfixtest.Set(260, make([]byte, 24)...))), false},
		{"set 2 of netflow9", framed(from4, to4, ipfixtest.Message(h9, ipfixtest.Set(2, ipfixtest.Record...))), false},
		{"version 5", framed(from4, to4, append([]byte{0, 5}, make([]byte, 60)...)), false},
		{"another port", framed(from4, netip.MustParseAddrPort("10.0.0.1:4740"), ipfixtest.Message(h10, ipfixtest.Set(2, ipfixtest.Record...))), false},
		{"a fragment", with(framed(from4, to4, ipfixtest.Message(h10, ipfixtest.Set(2, ipfixtest.Record...))), func(b []byte) { b[14+6] = 0x20 }), false},
		{"not UDP", with(framed(from4, to4, ipfixtest.Message(h10, ipfixtest.Set(2, ipfixtest.Record...))), func(b []byte) { b[14+9] = unix.IPPROTO_TCP }), false},
		{"options in the IP header", ipOptions(framed(from4, to4, ipfixtest.Message(h10, ipfixtest.Set(2, ipfixtest.Record...)))), true},
		{"our own replay", append([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0}, udpPacket(from4, to4, ipfixtest.Message(h10, ipfixtest.Set(2, ipfixtest.Record...)))...), false},
		{"our own replay over IPv6", append([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x86, 0xdd}, udpPacket(from6, to6, ipfixtest.Message(h9, ipfixtest.Set(0, ipfixtest.Record...)))...), false},
		{"an empty datagram", framed(from4, to4, nil), false},
		{"a set of no length", framed(from4, to4, ipfixtest.Message(h10, []byte{1, 4, 0, 0, 0, 2, 0, 8, 0, 0, 0, 0})), false},
	} {
		ret, err := c.Programs[bpf.TemplatesProgTemplatesFilter].Run(&ebpf.RunOptions{Data: x.frame})
		if err != nil {
			t.Fatal(err)
		}
		if (ret != 0) != x.want {
			t.Errorf("%s: %d bytes wanted", x.name, ret)
		}
	}
	key := bpf.TemplatesSession{Src: from4.Addr().As16(), Dst: to4.Addr().As16(), Sport: 50000, Dport: 4739, Version: ipfix.IPFIX, Domain: 3}
	sessions := c.Maps[bpf.TemplatesMapTemplatesSessions]
	var h bpf.TemplatesHeard
	if sessions.Lookup(key, &h) == nil {
		t.Error("the filter entered a session by itself")
	}
	if err := sessions.Put(key, h); err != nil {
		t.Fatal(err)
	}
	frame := framed(from4, to4, ipfixtest.Message(h10, ipfixtest.Set(260, make([]byte, 24)...), ipfixtest.Set(2, ipfixtest.Record...)))
	if _, err := c.Programs[bpf.TemplatesProgTemplatesFilter].Run(&ebpf.RunOptions{Data: frame, Repeat: 3}); err != nil {
		t.Fatal(err)
	}
	if err := sessions.Lookup(key, &h); err != nil {
		t.Fatal(err)
	}
	if h.Messages != 3 || h.Last == 0 || h.Sequence != 8 || h.ExportTime != 77 || h.Sets != 2 || h.Set[0].Id != 260 || h.Set[0].Length != 28 || h.Set[1].Id != 2 {
		t.Errorf("noted %+v", h)
	}
	s := &FlowSession{Templates: e10}
	if next, exact := s.nextSequence(key, h); next != 10 || !exact {
		t.Errorf("two records after 8: the next message is %d, exact %v", next, exact)
	}
}

// ipOptions puts four bytes of options behind the IPv4 header of a frame.
func ipOptions(frame []byte) []byte {
	frame[14]++
	return append(append(append([]byte{}, frame[:34]...), 1, 1, 1, 1), frame[34:]...)
}

func BenchmarkTemplateFilter(b *testing.B) {
	c := loadFilter(b)
	from, to := netip.MustParseAddrPort("192.0.2.7:50000"), netip.MustParseAddrPort("10.0.0.1:4739")
	key := bpf.TemplatesSession{Src: from.Addr().As16(), Dst: to.Addr().As16(), Sport: 50000, Dport: 4739, Version: ipfix.IPFIX, Domain: 3}
	if err := c.Maps[bpf.TemplatesMapTemplatesSessions].Put(key, bpf.TemplatesHeard{}); err != nil {
		b.Fatal(err)
	}
	data := ipfixtest.Message(ipfix.Header{Version: ipfix.IPFIX, Domain: 3}, ipfixtest.Set(260, make([]byte, 1200)...))
	tcp := framed(from, to, data)
	tcp[14+9] = unix.IPPROTO_TCP
	empty, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		b.Fatal(err)
	}
	defer empty.Close()
	b.Run("no filter", func(b *testing.B) { // the cost of the kernel's loop
		if _, err := empty.Run(&ebpf.RunOptions{Data: data, Repeat: uint32(b.N)}); err != nil {
			b.Fatal(err)
		}
	})
	for name, frame := range map[string][]byte{"tcp": tcp, "another port": framed(from, netip.MustParseAddrPort("10.0.0.1:53"), data), "data": framed(from, to, data)} {
		b.Run(name, func(b *testing.B) {
			if _, err := c.Programs[bpf.TemplatesProgTemplatesFilter].Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(b.N)}); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// TestTemplateBudgets: the filter passes a burst of each source, and of all unknown sources together. Known sessions
// have a separate budget. The filter counts the rest.
func TestTemplateBudgets(t *testing.T) {
	c := loadFilter(t)
	to4, to6 := netip.MustParseAddrPort("10.0.0.1:4739"), netip.MustParseAddrPort("[2001:db8::1]:4739")
	message := ipfixtest.Message(ipfix.Header{Version: ipfix.IPFIX, Domain: 3}, ipfixtest.Set(2, ipfixtest.Record...))
	var sent, passed uint64
	start := time.Now()
	send := func(from netip.AddrPort) bool {
		t.Helper()
		to := to4
		if from.Addr().Is6() {
			to = to6
		}
		ret, err := c.Programs[bpf.TemplatesProgTemplatesFilter].Run(&ebpf.RunOptions{Data: framed(from, to, message)})
		if err != nil {
			t.Fatal(err)
		}
		sent++
		if ret != 0 {
			passed++
		}
		return ret != 0
	}
	many := func(n int, source func(i int) netip.Addr) (got int) {
		for i := range n {
			if send(netip.AddrPortFrom(source(i), uint16(1024+i))) {
				got++
			}
		}
		return got
	}
	within := func(what string, got, burst, rate int) {
		t.Helper()
		if most := burst + 1 + int(time.Since(start).Seconds()*float64(rate)+1); got < burst-1 || got > most {
			t.Errorf("%s: %d messages, want %d to %d", what, got, burst, most)
		}
	}
	one := netip.MustParseAddr("192.0.2.7")
	within("one address", many(3000, func(int) netip.Addr { return one }), 1024, 32)
	within("one /64", many(3000, func(i int) netip.Addr {
		return netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 0, 0, 0, 1, 9: byte(i >> 8), 10: byte(i), 15: 1})
	}), 1024, 32)
	known := netip.MustParseAddrPort("192.0.2.8:50000")
	key := bpf.TemplatesSession{Src: known.Addr().As16(), Dst: to4.Addr().As16(), Sport: 50000, Dport: 4739, Version: ipfix.IPFIX, Domain: 3}
	if err := c.Maps[bpf.TemplatesMapTemplatesSessions].Put(key, bpf.TemplatesHeard{}); err != nil {
		t.Fatal(err)
	}
	got := many(20000, func(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}) })
	within("all that are not known", got+2*1024, 16384, 500+2*32)
	if !send(known) {
		t.Error("a known exporter is refused in a flood of forged ones")
	}
	var port bpf.TemplatesPort
	if err := c.Maps[bpf.TemplatesMapTemplatesPorts].Lookup(uint16(4739), &port); err != nil || port.Refused != sent-passed {
		t.Errorf("%d refused counted, want %d (%v)", port.Refused, sent-passed, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"
)

// large returns a large TCP packet in the kernel's format.
func large(t *testing.T, v6 bool, payload []byte, size int) []byte {
	eth := &layers.Ethernet{SrcMAC: make(net.HardwareAddr, 6), DstMAC: make(net.HardwareAddr, 6), EthernetType: layers.EthernetTypeIPv4}
	tcp := &layers.TCP{SrcPort: 1, DstPort: 2, Seq: 0xfffffff0, Ack: 5, ACK: true, PSH: true, FIN: true, CWR: true, Window: 9,
		Options: []layers.TCPOption{{OptionType: 1}, {OptionType: 1}, {OptionType: 8, OptionLength: 10, OptionData: make([]byte, 8)}}}
	var ip gopacket.SerializableLayer
	kind, start := byte(unix.VIRTIO_NET_HDR_GSO_TCPV4), 34
	if v6 {
		kind, start = unix.VIRTIO_NET_HDR_GSO_TCPV6, 54
		eth.EthernetType = layers.EthernetTypeIPv6
		l := &layers.IPv6{Version: 6, NextHeader: 6, HopLimit: 64, SrcIP: net.ParseIP("fd01::1"), DstIP: net.ParseIP("fd01::2")}
		_ = tcp.SetNetworkLayerForChecksum(l)
		ip = l
	} else {
		l := &layers.IPv4{Version: 4, TTL: 64, Id: 0xffff, Protocol: 6, SrcIP: net.IP{10, 0, 0, 1}, DstIP: net.IP{10, 0, 0, 2}}
		_ = tcp.SetNetworkLayerForChecksum(l)
		ip = l
	}
	b := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(b, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, eth, ip, tcp, gopacket.Payload(payload)); err != nil {
		t.Fatal(err)
	}
	h := make([]byte, headerLen)
	h[0], h[atKind] = 1, kind
	binary.NativeEndian.PutUint16(h[2:], 200) // only a hint: more than the headers
	binary.NativeEndian.PutUint16(h[atSize:], uint16(size))
	binary.NativeEndian.PutUint16(h[atSumStart:], uint16(start))
	return append(h, b.Bytes()...)
}

// Cut segments equal the kernel's.
func TestCut(t *testing.T) {
	payload := make([]byte, 3500)
	for i := range payload {
		payload[i] = byte(i * 7)
	}
	for _, v6 := range []bool{false, true} {
		s := parseSegments(large(t, v6, payload, 1000))
		if s.n != 4 || s.wireLen() != 3500+4*s.headers {
			t.Fatalf("%d segments, %d bytes on the wire, %d of headers", s.n, s.wireLen(), s.headers)
		}
		for _, c := range []struct{ from, before int }{{0, 1}, {0, 3}, {1, 2}, {1, 4}, {3, 4}, {0, 4}} {
			b := s.cut(nil, c.from, c.before)
			p := gopacket.NewPacket(b[headerLen:], layers.LayerTypeEthernet, gopacket.Default)
			tcp, _ := p.Layer(layers.LayerTypeTCP).(*layers.TCP)
			if p.ErrorLayer() != nil || tcp == nil {
				t.Fatalf("%+v: %v", c, p.ErrorLayer())
			}
			want := payload[c.from*1000 : min(c.before*1000, 3500)]
			if !bytes.Equal(tcp.Payload, want) || tcp.Seq != 0xfffffff0+uint32(c.from*1000) {
				t.Errorf("%+v: %d bytes at %d", c, len(tcp.Payload), tcp.Seq)
			}
			if last, first := c.before == 4, c.from == 0; tcp.FIN != last || tcp.PSH != last || tcp.CWR != first || !tcp.ACK {
				t.Errorf("%+v: flags FIN %v PSH %v CWR %v", c, tcp.FIN, tcp.PSH, tcp.CWR)
			}
			if one := len(want) <= 1000; one != (b[atKind] == unix.VIRTIO_NET_HDR_GSO_NONE) {
				t.Errorf("%+v: kind %d", c, b[atKind])
			}
			checkSums(t, b[headerLen:], s.tcp)
		}
	}
}

// checkSums completes TCP's checksum like the kernel, and verifies both.
func checkSums(t *testing.T, p []byte, start int) {
	t.Helper()
	tcp := p[start:]
	if len(tcp)%2 != 0 {
		tcp = append(bytes.Clone(tcp), 0)
	}
	full := ^fold(add(0, tcp)) // over the field with the pseudo-header's sum
	binary.BigEndian.PutUint16(tcp[16:], full)
	addrs := p[start-8 : start]
	if start == 54 {
		addrs = p[start-32 : start]
	}
	if sum := fold(add(add(0, addrs), tcp) + unix.IPPROTO_TCP + uint32(len(p)-start)); sum != 0xffff {
		t.Errorf("TCP's checksum gives %#x", sum)
	}
	if start == 34 {
		if sum := fold(add(0, p[14:34])); sum != 0xffff {
			t.Errorf("IP's checksum gives %#x", sum)
		}
	}
}

func TestOrdinaryFrames(t *testing.T) {
	for name, frame := range map[string][]byte{"nothing": make([]byte, headerLen), "short": append([]byte{0, unix.VIRTIO_NET_HDR_GSO_TCPV4}, make([]byte, 20)...),
		"an ordinary frame": make([]byte, headerLen+1514), "one segment": large(t, false, make([]byte, 999), 1000)} {
		if s := parseSegments(frame); s.n != 1 || s.wireLen() != len(frame)-headerLen {
			t.Errorf("%s: %d segments", name, s.n)
		}
	}
}

func TestSpared(t *testing.T) {
	frame := func(kind uint16, at int, v ...byte) []byte {
		b := make([]byte, 100)
		binary.BigEndian.PutUint16(b[12:], kind)
		copy(b[at:], v)
		return b
	}
	hop := frame(0x86dd, 20, 0)
	hop[54], hop[62] = 58, 143
	ns := frame(0x86dd, 20, 58)
	ns[54] = 135
	echo := frame(0x86dd, 20, 58)
	echo[54] = 128
	for _, tc := range []struct {
		name string
		b    []byte
		want bool
	}{{"ARP", frame(0x0806, 20), true}, {"IPv4", frame(0x0800, 23, 6), false}, {"IPv6 TCP", frame(0x86dd, 20, 6), false},
		{"neighbour solicitation", ns, true}, {"group report", hop, true}, {"echo", echo, false}, {"too short", make([]byte, 5), true}} {
		if got := spared(tc.b); got != tc.want {
			t.Errorf("%s: spared %v", tc.name, got)
		}
	}
}

func TestPending(t *testing.T) {
	var p pending
	for i, at := range []int64{5, 3, 9, 3, 1, 5, 7, 3} {
		p.push(at, 1, []byte{byte(i)})
	}
	var order []byte
	for len(p.items) > 0 {
		i := p.pop()
		order = append(order, i.buf[0])
		p.free(i.buf)
	}
	if want := []byte{4, 1, 3, 7, 0, 5, 6, 2}; !bytes.Equal(order, want) {
		t.Errorf("order %v, want %v", order, want)
	}
}

func TestHistogram(t *testing.T) {
	for _, v := range []uint64{0, 1, 15, 16, 31, 32, 33, 1000, 1 << 20, 1<<40 + 12345} {
		top := bucketTop(bucketIndex(v))
		if top < v || float64(top-v) > float64(v)/16 {
			t.Errorf("%d is counted as up to %d", v, top)
		}
	}
	var h histogram
	for i := range 1000 {
		h.add(int64(i) * 1000)
	}
	if p := h.quantile(.5); p < 499*time.Microsecond || p > 535*time.Microsecond {
		t.Errorf("median %v", p)
	}
	if h.quantile(1) != 999*time.Microsecond {
		t.Errorf("longest %v", h.quantile(1))
	}
}

// TCP's bytes pass a line with loss and reordering, complete and once, with large packets cut at their
// losses.
func TestBytesThroughLoss(t *testing.T) {
	line := Line{Rate: 1e9, Delay: 2 * time.Millisecond, Loss: .01, Reorder: .01}
	r := newRig(t, 3, line, line)
	var ln *net.TCPListener
	r.do(r.b, func() (err error) {
		ln, err = net.ListenTCP("tcp4", &net.TCPAddr{IP: r.addrB.AsSlice(), Port: 7001})
		return err
	})
	defer ln.Close()
	var c *net.TCPConn
	r.do(r.a, func() (err error) { c, err = net.DialTCP("tcp4", nil, ln.Addr().(*net.TCPAddr)); return err })
	defer c.Close()
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	sent := make([]byte, 16<<20)
	for i := range sent {
		sent[i] = byte((uint64(i) * 0x9e3779b97f4a7c15) >> 56)
	}
	go func() {
		_, _ = c.Write(sent) // missing bytes are detected below
		_ = c.CloseWrite()
	}()
	_ = s.SetReadDeadline(time.Now().Add(2 * time.Minute))
	got, err := io.ReadAll(s)
	if err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%d bytes of %d, equal: %v, %v", len(got), len(sent), bytes.Equal(got, sent), err)
	}
	ab, _, err := r.line.Stats()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", ab)
	within(t, "lost", int(ab.Lost), int(ab.Packets), line.Loss)
	if ab.Packets < 16<<20/1448 {
		t.Errorf("%d packets only", ab.Packets)
	}
}

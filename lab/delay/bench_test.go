// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"errors"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

func init() { openers["packet"] = openPacket }

// openPacket opens a packet socket on a device.
func openPacket(name string, _ bool) (int, error) {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return -1, err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	const everything = 0x0300 // ETH_P_ALL in network byte order
	index := l.Attrs().Index
	err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20),
		unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP,
			&unix.PacketMreq{Ifindex: int32(index), Type: unix.PACKET_MR_PROMISC}),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: everything, Ifindex: index}))
	return fd, err
}

// newPacketRig is newRig over packet sockets on two veth pairs to a namespace in the middle, the
// alternative design of such a line.
func newPacketRig(t testing.TB, seed uint64, l Line) *rig {
	t.Helper()
	r := newEnds(t, seed)
	middle, _, err := r.env.Namespace("middle")
	if err != nil {
		t.Fatal(err)
	}
	var s setup
	s.Lines, s.Device = [2]Line{l, l}, "packet"
	inner := [2]topo.End{{NS: middle, Name: "m0"}, {NS: middle, Name: "m1"}}
	for i, e := range []topo.End{r.a, r.b} {
		if err := topo.Cable(inner[i], e); err != nil {
			t.Fatal(err)
		}
		if !l.large() { // like the kernel with TUNSETOFFLOAD
			r.do(e, func() error {
				link, err := netlink.LinkByName(e.Name)
				if err != nil {
					return err
				}
				return netlink.LinkSetGSOMaxSegs(link, 1)
			})
		}
	}
	if r.line, err = start(r.env, inner[0], inner[1], s); err != nil {
		t.Fatal(err)
	}
	return r
}

// BenchmarkLine measures TCP's throughput and the packets' lateness with both designs of a line. One
// iteration is a second of traffic.
func BenchmarkLine(b *testing.B) {
	for _, l := range []struct {
		name string
		line Line
	}{
		{"1Gbps", Line{Rate: 1e9, Delay: time.Millisecond}},
		{"1Gbps-40ms-1%loss", Line{Rate: 1e9, Delay: 20 * time.Millisecond, Loss: .01}},
		{"unlimited", Line{}},
	} {
		for _, way := range []struct {
			name string
			make func(b *testing.B) *rig
		}{
			{"tap", func(b *testing.B) *rig { return newRig(b, 1, l.line, l.line) }},
			{"packet", func(b *testing.B) *rig { return newPacketRig(b, 1, l.line) }},
		} {
			b.Run(l.name+"/"+way.name, func(b *testing.B) {
				r := way.make(b)
				stalls := lab.WatchStalls()
				var bits float64
				for b.Loop() {
					bits = r.throughput(time.Second)
				}
				_, stall, worst := stalls.Stop()
				ab, ba, err := r.line.Stats()
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(bits/1e6, "Mbit/s")
				ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
				b.ReportMetric(ms(ab.LatenessP50), "late-p50-ms")
				b.ReportMetric(ms(max(ab.LatenessP99, ba.LatenessP99)), "late-p99-ms")
				b.ReportMetric(ms(max(ab.LatenessMax, ba.LatenessMax)), "late-max-ms")
				b.ReportMetric(ms(stall), "stall-p99-ms")
				b.ReportMetric(ms(worst), "stall-max-ms")
			})
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/internal/nstest"
)

// bench runs the programs on given packets at given times. Sent packets arrive at the other end of a cable.
type bench struct {
	t     testing.TB
	o     bpf.BfdObjects
	w     tables
	clock *ebpf.Variable
	index int    // of the sessions' device
	out   int    // socket at its other end
	taken uint64 // frames received by the socket
	now   time.Duration
}

func newBench(t testing.TB) *bench {
	t.Helper()
	nstest.NeedRoot(t)
	spec, err := bpf.LoadBfd()
	if err != nil {
		t.Fatal(err)
	}
	if err := spec.Variables["bfd_clock_given"].Set(uint32(1)); err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, now: time.Hour}
	if err := spec.LoadAndAssign(&b.o, nil); err != nil {
		if v, ok := errors.AsType[*ebpf.VerifierError](err); ok {
			t.Fatalf("%+.20v", v)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() { b.o.Close() })
	b.w, b.clock = compiledTables(b.o.BfdMaps), b.o.BfdGivenClock
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "bfd0"}, PeerName: "bfd1"}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.LinkDel(link) })
	ends := map[string]int{"bfd0": 0, "bfd1": 0}
	for name := range ends {
		l, err := netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		ends[name] = l.Attrs().Index
		// No frames of the kernel itself: the bench counts frames.
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
	}
	b.index, b.out = ends["bfd0"], socket(t, ends["bfd1"])
	for _, index := range ends {
		if err := netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// socket receives the frames arriving at a device. It is still down.
func socket(t testing.TB, index int) int {
	t.Helper()
	all := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0) // receives from bind on
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index}); err != nil {
		t.Fatal(err)
	}
	// The device is down: a pending error says so.
	if _, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil {
		t.Fatal(err)
	}
	return fd
}

// sent returns the next BFD frame sent, or nil. It waits for frames sent but not arrived yet: under
// load the kernel hands them to the other end in its own thread.
func (b *bench) sent() []byte {
	b.t.Helper()
	buf := make([]byte, 2048)
	for {
		n, _, err := unix.Recvfrom(b.out, buf, 0)
		if err == unix.EAGAIN {
			if b.frames() == b.taken {
				return nil
			}
			if n, err := unix.Poll([]unix.PollFd{{Fd: int32(b.out), Events: unix.POLLIN}}, 10_000); n == 0 || err != nil && err != unix.EINTR {
				b.t.Fatalf("%d frames sent, %d arrived: %v", b.frames(), b.taken, err)
			}
			continue
		}
		if err != nil {
			b.t.Fatal(err)
		}
		b.taken++
		if f := buf[:n]; n >= 66 && (f[12] == 8 && f[23] == 17 || f[12] == 0x86 && f[20] == 17) {
			return f
		}
	}
}

// frames returns the number of frames sent by the sessions' device.
func (b *bench) frames() uint64 {
	b.t.Helper()
	l, err := netlink.LinkByIndex(b.index)
	if err != nil {
		b.t.Fatal(err)
	}
	return l.Attrs().Statistics.TxPackets
}

func (b *bench) setClock() {
	b.t.Helper()
	if err := b.clock.Set(uint64(b.now)); err != nil {
		b.t.Fatal(err)
	}
}

// tick runs one tick of the tick source.
func (b *bench) tick() {
	b.t.Helper()
	b.setClock()
	beat := make([]byte, 180)
	binary.BigEndian.PutUint16(beat[12:], unix.ETH_P_IPV6)
	ret, out, err := b.o.BfdTick.Test(beat)
	if err != nil || int32(ret) != -1 {
		b.t.Fatalf("a tick: %d, %v", int32(ret), err)
	}
	if string(out) != string(beat) {
		b.t.Fatalf("a tick's packet came out as another:\n%x", out)
	}
}

// receive passes a frame to the receive program.
func (b *bench) receive(frame []byte) int32 {
	b.t.Helper()
	return b.run(b.o.BfdReceive, frame)
}

func (b *bench) run(p *ebpf.Program, frame []byte) int32 {
	b.t.Helper()
	b.setClock()
	ctx := make([]byte, 192)
	binary.NativeEndian.PutUint32(ctx[40:], uint32(b.index)) // struct __sk_buff: ifindex
	ret, err := p.Run(&ebpf.RunOptions{Data: frame, Context: ctx})
	if err != nil {
		b.t.Fatal(err)
	}
	return int32(ret)
}

// frame returns a datagram to the BFD port.
func frame(from, to netip.Addr, hops byte, payload []byte) []byte {
	f := make([]byte, 12, 128)
	udp := binary.BigEndian.AppendUint16(nil, bfd.FirstSourcePort)
	udp = binary.BigEndian.AppendUint16(udp, bfdtest.Port)
	udp = binary.BigEndian.AppendUint16(udp, uint16(8+len(payload)))
	udp = append(udp, 0, 0)
	if from.Is4() {
		f = append(f, 8, 0, 0x45, 0, 0, byte(28+len(payload)), 0, 0, 0x40, 0, hops, unix.IPPROTO_UDP, 0, 0)
	} else {
		f = append(f, 0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(8+len(payload)), unix.IPPROTO_UDP, hops)
	}
	f = append(append(f, from.AsSlice()...), to.AsSlice()...)
	return append(append(f, udp...), payload...)
}

// fromPort sets the source port of a frame.
func fromPort(f []byte, port uint16) []byte {
	at := 14 + 20
	if f[12] != 8 {
		at = 14 + 40
	}
	binary.BigEndian.PutUint16(f[at:], port)
	return f
}

var (
	local4, peer4 = netip.MustParseAddr("10.7.0.1"), netip.MustParseAddr("10.7.0.2")
	local6, peer6 = netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fe80::2")
)

// at sets the link address of a session's neighbour.
func (b *bench) at(place uint32) {
	b.t.Helper()
	h := make([]byte, b.w.hops.ValueSize())
	binary.NativeEndian.PutUint64(h, uint64(b.now))
	copy(h[8:], "\x02\x00\x00\x00\x00\x02\x02\x00\x00\x00\x00\x01")
	h[20] = 1
	if err := b.w.hops.Put(place, h); err != nil {
		b.t.Fatal(err)
	}
}

// The programs behave like the model in package bfdtest, for random packets, times and changes of the session.
func TestSameAsTheModel(t *testing.T) {
	b := newBench(t)
	rounds, steps := 60, 300
	if testing.Short() {
		rounds = 6
	}
	var states [4]int
	foreign := 0
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 3))
		local, peer := local4, peer4
		if seed%2 == 1 {
			local, peer = local6, peer6
		}
		interval := func() time.Duration { return time.Duration(r.IntN(60)) * time.Millisecond }
		config := func() bfd.Config {
			return bfd.Config{Discriminator: 0x01020304, Multiplier: uint8(1 + r.IntN(4)), DesiredTx: interval() + time.Millisecond,
				RequiredRx: interval(), EchoRx: interval(), Passive: r.IntN(4) == 0, Down: r.IntN(6) == 0}
		}
		s := &Session{Config: config(), Local: local, Peer: peer, Ifindex: b.index, SourcePort: 50000}
		if seed%3 == 2 {
			s.Key = &bfd.Key{Type: bfd.KeyedSHA1 + bfd.AuthType(seed/3%2), ID: 7, Secret: []byte("something secret")[:4+r.IntN(12)]}
		}
		place, generation := uint32(r.IntN(maxSessions)), uint32(1)
		if err := b.w.put(place, s, generation); err != nil {
			t.Fatal(err)
		}
		b.at(place)
		model := bfdtest.New(s.Config)
		other := uint32(0x0a0b0c0d)
		var sequence uint32
		heard := b.now
		b.tick()
		for b.sent() != nil {
		}
		for step := range steps {
			final := false
			switch r.IntN(8) {
			case 0:
				s.Config = config()
				generation++
				if err := b.w.put(place, s, generation); err != nil {
					t.Fatal(err)
				}
				model.Set(s.Config)
			case 1, 2, 3, 4:
				p := bfdtest.Packet{State: bfd.State(r.IntN(4)), Diag: bfd.Diag(r.IntN(8)), Multiplier: uint8(1 + r.IntN(4)), Mine: other,
					Yours: model.Config().Discriminator, DesiredTx: interval(), RequiredRx: interval(), EchoRx: interval(),
					Independent: r.IntN(2) == 0, Demand: r.IntN(9) == 0, Poll: r.IntN(4) == 0}
				p.Final = !p.Poll && r.IntN(3) == 0
				if p.State <= bfd.Down && r.IntN(2) == 0 {
					p.Yours = 0
				}
				port := uint16(bfd.FirstSourcePort)
				if r.IntN(8) == 0 {
					port++
				}
				if r.IntN(8) == 0 {
					p.Mine++
				}
				if s.Key != nil {
					sequence++
					p.Auth = &bfdtest.Auth{Type: s.Key.Type, KeyID: s.Key.ID, Sequence: sequence}
				}
				wire := p.Append(nil)
				if s.Key != nil {
					bfdtest.Seal(s.Key, wire)
				}
				if got := b.receive(fromPort(frame(peer, local, bfdtest.HopLimit, wire), port)); got != 2 {
					t.Fatalf("seed %d, step %d: a packet is not taken: %d", seed, step, got)
				}
				if s.Key == nil && model.Foreign(port, p, b.now-heard) {
					foreign++
					break
				}
				heard = b.now
				p.Auth = nil
				var err error
				if final, err = model.ReceiveFrom(port, p); err != nil {
					t.Fatal(err)
				}
			default:
				b.now += time.Duration(r.IntN(200)) * time.Millisecond
			}
			b.at(place)
			b.tick()
			if limit := model.Lifetime(); limit != 0 && b.now-heard > limit {
				model.Expire()
			}
			got, there, err := b.w.status(place)
			if err != nil || !there {
				t.Fatal(err)
			}
			states[got.State]++
			said := model.Packet()
			if got.State != model.State || got.Diag != model.Diag || got.Remote != model.Remote || got.Polling != said.Poll ||
				got.Interval != model.Interval() || got.Detection != model.DetectionTime() {
				t.Fatalf("seed %d, step %d:\n%+v\nand by the model every %v, waits %v, says %+v, remote %+v", seed, step, got, model.Interval(), model.DetectionTime(), said, model.Remote)
			}
			b.compare(seed, step, s, said, final, local, peer)
		}
		if err := b.w.remove(place); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("looked at sessions admin-down, down, init, up: %d times; %d packets were another sender's", states, foreign)
	if foreign == 0 {
		t.Error("no packet was another sender's")
	}
	for s, n := range states {
		if n == 0 {
			t.Errorf("never %s", bfd.State(s))
		}
	}
}

// compare checks a packet sent, if any.
func (b *bench) compare(seed uint64, step int, s *Session, said bfdtest.Packet, final bool, local, peer netip.Addr) {
	b.t.Helper()
	f := b.sent()
	if f == nil {
		if final {
			b.t.Fatalf("seed %d, step %d: a poll was not answered", seed, step)
		}
		return
	}
	at := 14 + 20 + 8
	hops := f[22]
	if peer.Is6() {
		at, hops = 14+40+8, f[21]
	}
	if hops != bfdtest.HopLimit || !valid(f) {
		b.t.Fatalf("seed %d, step %d: hop limit %d, or a wrong checksum:\n%x", seed, step, hops, f)
	}
	p, err := bfdtest.Parse(f[at:])
	if err != nil {
		b.t.Fatalf("seed %d, step %d: %v\n%x", seed, step, err, f)
	}
	if s.Key != nil {
		if err := bfdtest.Check(s.Key, f[at:], &p, 0, false, 0); err != nil {
			b.t.Fatalf("seed %d, step %d: %v", seed, step, err)
		}
		p.Auth = nil
	}
	if final {
		said.Poll, said.Final = false, true
	}
	if p != said {
		b.t.Fatalf("seed %d, step %d: sent %+v\nwant %+v", seed, step, p, said)
	}
}

// valid reports whether the checksums of a frame are right.
func valid(f []byte) bool {
	sum := func(parts ...[]byte) uint16 {
		var s uint32
		for _, b := range parts {
			for ; len(b) >= 2; b = b[2:] {
				s += uint32(binary.BigEndian.Uint16(b))
			}
		}
		for s > 0xffff {
			s = s&0xffff + s>>16
		}
		return uint16(s)
	}
	if f[12] == 8 {
		return sum(f[14:34]) == 0xffff && int(binary.BigEndian.Uint16(f[16:])) == len(f)-14
	}
	udp := f[54:]
	return sum(f[22:54], udp, []byte{0, 17}, udp[4:6]) == 0xffff && int(binary.BigEndian.Uint16(f[18:])) == len(udp)
}

func compiledTables(o bpf.BfdMaps) tables {
	return tables{setups: o.BfdSetups, states: o.BfdStates, hops: o.BfdHops, echoes: o.BfdEchoes, mine: o.BfdMine, peers: o.BfdPeers, clock: o.BfdClock}
}

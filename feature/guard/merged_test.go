// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	client "github.com/weir-project/weir/clients/go/guard"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/probe"
)

// merged makes the simulation's next packets consist of segments datagrams, by fields of struct
// __sk_buff.
func (s *Simulation) merged(segments, size uint32) {
	var b [192]byte
	binary.NativeEndian.PutUint32(b[164:], segments) // gso_segs
	binary.NativeEndian.PutUint32(b[176:], size)     // gso_size
	s.options.Context = b[:]
}

// simulated returns a guard of 10.77.0.2:443.
func simulated(t *testing.T, h Hook, l Limit) *Simulation {
	t.Helper()
	s, err := Simulate(h, Limits{Total: l}, netip.MustParseAddrPort("10.77.0.2:443"), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	s.Seed(7, 9)
	return s
}

func (s *Simulation) mustPass(t *testing.T, at uint64, frame []byte) bool {
	t.Helper()
	ok, err := s.Passes(at, frame)
	if err != nil {
		t.Fatal(err)
	}
	return ok
}

// datagramOf returns a frame from a host, with a payload of the given size.
func datagramOf(host byte, payload int) []byte {
	u := udpTo(443)[:8]
	binary.BigEndian.PutUint16(u[4:], uint16(8+payload))
	ip := ip4(unix.IPPROTO_UDP, 0, 0, 8+payload)
	ip[15] = host
	return frameOf(v4type, nil, ip, u, make([]byte, payload))
}

// TestMergedCounts checks a merged packet counting as its number of datagrams.
func TestMergedCounts(t *testing.T) {
	need(t)
	for _, h := range []Hook{Socket, Cgroup} {
		s := simulated(t, h, 100_000)
		frame := datagramOf(7, 1000)
		at := uint64(1 << 40)
		for _, c := range []struct {
			segments, size uint32
			passed, bad    uint64
		}{
			{0, 0, 1, 0}, {1, 0, 1, 0}, {50, 20, 50, 0}, {128, 8, 128, 0},
			{0, 100, 10, 0}, {0, 300, 4, 0}, // merged by another host: computed from the size
			{129, 8, 0, 1}, {4000, 8, 0, 1}, {0, 1, 0, 1}, // kernels do not merge as many
		} {
			before := s.Counts(at)
			s.merged(c.segments, c.size)
			ok := s.mustPass(t, at, frame)
			after := s.Counts(at)
			if after.Passed-before.Passed != c.passed || after.Malformed-before.Malformed != c.bad || ok != (c.bad == 0) {
				t.Errorf("%s: %d of %d bytes: passes %v, counted %d passed and %d malformed; want %d and %d", h, c.segments, c.size,
					ok, after.Passed-before.Passed, after.Malformed-before.Malformed, c.passed, c.bad)
			}
		}
		if n := s.Spent(at); n != 1+1+50+128+10+4 {
			t.Errorf("%s: %d packets are owed, want 194", h, n)
		}
		if n := s.Counted(); n < 194 {
			t.Errorf("%s: the source's count is %d, want 194", h, n)
		}
	}
}

// TestMergedLimit floods with merged packets. The total stays below the limit plus one merged
// packet, and both hooks agree. An earlier client keeps its share. A sole sender gets the whole
// limit, once other sources never existed or were silent for the lifetime of a reservation.
func TestMergedLimit(t *testing.T) {
	need(t)
	const second, segments = uint64(1e9), 50
	const calm, gone, end = 20 * second, 50 * second, 200 * second
	for _, limit := range []Limit{100, 300, 1000} {
		for _, beside := range []bool{false, true} {
			hooks := []*Simulation{simulated(t, Socket, limit), simulated(t, Cgroup, limit)}
			attack, client := datagramOf(66, 1000), datagramOf(7, 10)
			passed, late, came, sent := 0, 0, 0, 0
			start := uint64(1 << 40)
			for t0 := uint64(0); t0 < end; t0 += second / 500 {
				at := start + t0
				if beside && t0 < gone && t0%(second/2) == 0 {
					ok := agreeing(t, hooks, at, client, 0)
					if t0 >= calm {
						sent++
						if ok {
							came++
							passed++
						}
					}
				}
				if t0 >= calm && agreeing(t, hooks, at+1000, attack, segments) {
					passed += segments
					if t0 >= gone+125*second {
						late += segments
					}
				}
			}
			took := (end - calm) / second
			most := int(float64(limit)*(float64(took)+debt(limit).Seconds())) + 127
			if passed > most {
				t.Errorf("limit %s, with a client %v: %d datagrams passed in %d s, want at most %d", limit, beside, passed, took, most)
			}
			if least := int(limit) * 25 / 2; late < least {
				t.Errorf("limit %s, with a client %v: %d datagrams passed in the last 25 s, without other traffic, want %d", limit, beside, late, least)
			}
			if beside && came < sent*95/100 {
				t.Errorf("limit %s: %d of %d of a known client's datagrams passed", limit, came, sent)
			}
		}
	}
}

// agreeing lets hooks decide a packet and checks them for agreement.
func agreeing(t *testing.T, hooks []*Simulation, at uint64, frame []byte, segments uint32) bool {
	t.Helper()
	var got []bool
	for _, s := range hooks {
		s.merged(segments, segments)
		got = append(got, s.mustPass(t, at, frame))
	}
	if slices.Contains(got, true) && slices.Contains(got, false) {
		t.Fatalf("at %d: hooks disagree: %v", at, got)
	}
	return got[0]
}

// floodMerged sends n times 50 datagrams of 100 bytes in one write (UDP_SEGMENT), and returns the
// time taken.
func floodMerged(t *testing.T, to net.Addr, n int) time.Duration {
	t.Helper()
	c, err := net.Dial("udp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := option(c.(*net.UDPConn), unix.UDP_SEGMENT, 100); err != nil {
		t.Skipf("need: kernel with UDP_SEGMENT: %v", err)
	}
	start := time.Now()
	b := make([]byte, 50*100)
	for range n {
		if _, err := c.Write(b); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	nstest.Until(t, "no packet waits in a CPU's backlog", func() bool { return nstest.Backlog(t).Waiting == 0 })
	return time.Since(start)
}

func option(c *net.UDPConn, name, value int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) { inner = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, name, value) })
	return errors.Join(err, inner)
}

// datagrams returns the number of datagrams, of 100 bytes each, received by a socket with UDP_GRO.
func (s udpServer) datagrams(t *testing.T) (n int) {
	t.Helper()
	raw, err := s.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1<<16)
	if err := raw.Control(func(fd uintptr) {
		for {
			got, _, err := unix.Recvfrom(int(fd), b, unix.MSG_DONTWAIT)
			if err != nil {
				return
			}
			n += got / 100
		}
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestMergedOnSockets floods sockets with merged datagrams enabled (UDP_GRO), as QUIC servers do.
// The application receives less than the limit, with a guard on its socket and at the sockets of a
// service.
func TestMergedOnSockets(t *testing.T) {
	const limit = 100
	gro := func(t *testing.T, address string) udpServer {
		s := listenUDP(t, address)
		if err := option(s.UDPConn, unix.UDP_GRO, 1); err != nil {
			t.Skipf("need: kernel with UDP_GRO: %v", err)
		}
		return s
	}
	check := func(t *testing.T, s udpServer, counts func() Counts) {
		t.Helper()
		took := floodMerged(t, s.LocalAddr(), 1000)
		n := s.datagrams(t)
		if n < 50 || n > most(limit, took)+127 {
			t.Errorf("%d of 50,000 datagrams arrived in %v, want 50 to %d", n, took, most(limit, took)+127)
		}
		if c := counts(); c.Passed != uint64(n) || c.Passed+c.Refused != 50_000 {
			t.Errorf("%d arrived, counted %+v", n, c)
		}
	}
	for _, address := range []string{"127.0.0.1:5300", "[::1]:5300"} {
		t.Run("socket "+address, func(t *testing.T) {
			need(t)
			nstest.Enter(t)
			s := gro(t, address)
			g, err := client.Attach(s, limit)
			if err != nil {
				t.Fatal(err)
			}
			defer g.Close()
			check(t, s, g.Counts)
		})
		t.Run("service "+address, func(t *testing.T) {
			w := newWorld(t, probe.CgroupIngress)
			w.apply(guarded(t, "quic", Options{Limit: limit}, "udp :5300"))
			check(t, gro(t, address), func() Counts { return w.state("quic").Counts })
			w.apply()
		})
	}
}

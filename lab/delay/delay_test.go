// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

func TestMain(m *testing.M) {
	Play()
	nstest.Main(m)
}

// rig is two hosts with a line between them.
type rig struct {
	t            testing.TB
	env          *lab.Env
	a, b         topo.End
	addrA, addrB netip.Addr
	line         *Delay
	close        func()
	sending      time.Duration // duration of the sends of arrivals
}

func newRig(t testing.TB, seed uint64, ab, ba Line) *rig {
	t.Helper()
	r := newEnds(t, seed)
	var err error
	if r.line, err = newTwo(r.env, r.a, r.b, ab, ba); err != nil {
		t.Fatal(err)
	}
	return r
}

func newEnds(t testing.TB, seed uint64) *rig {
	t.Helper()
	nstest.NeedRoot(t)
	env, err := lab.NewEnv(lab.Smoke, seed)
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	closing := func() {
		if closed {
			return
		}
		closed = true
		env.Close()
		if left := env.Leftovers(); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	t.Cleanup(closing)
	r := &rig{t: t, env: env, close: closing, addrA: netip.MustParseAddr("10.3.0.1"), addrB: netip.MustParseAddr("10.3.0.2")}
	for _, e := range []struct {
		end  *topo.End
		name string
		addr netip.Addr
	}{{&r.a, "a", r.addrA}, {&r.b, "b", r.addrB}} {
		h, _, err := env.Namespace(e.name)
		if err != nil {
			t.Fatal(err)
		}
		// Only packets of the test: with IPv6 the kernel sends some on its own.
		r.do(topo.End{NS: h}, func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0) })
		*e.end = topo.End{NS: h, Name: "line0", Addrs: []netip.Prefix{netip.PrefixFrom(e.addr, 24)}}
	}
	return r
}

func (r *rig) do(e topo.End, f func() error) {
	r.t.Helper()
	if err := e.NS.Do(f); err != nil {
		r.t.Fatal(err)
	}
}

// udp opens a socket at each end, for numbered datagrams from a to b.
func (r *rig) udp() (from, to *net.UDPConn) {
	r.t.Helper()
	r.do(r.b, func() (err error) {
		to, err = net.ListenUDP("udp4", &net.UDPAddr{IP: r.addrB.AsSlice(), Port: 7000})
		return err
	})
	r.do(r.a, func() (err error) {
		from, err = net.DialUDP("udp4", nil, to.LocalAddr().(*net.UDPAddr))
		return err
	})
	// A reader without CPU for a while loses nothing.
	control(r.t, to, func(fd int) { _ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20) })
	r.t.Cleanup(func() { from.Close(); to.Close() })
	return from, to
}

func control(t testing.TB, c syscall.Conn, f func(fd int)) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { f(int(fd)) })
	}
	if err != nil {
		t.Fatal(err)
	}
}

// introduce adds a permanent neighbour entry for b at a: few packets can wait for an unresolved neighbour.
func (r *rig) introduce() {
	r.t.Helper()
	var mac net.HardwareAddr
	r.do(r.b, func() error {
		l, err := netlink.LinkByName(r.b.Name)
		if err == nil {
			mac = l.Attrs().HardwareAddr
		}
		return err
	})
	r.do(r.a, func() error {
		l, err := netlink.LinkByName(r.a.Name)
		if err != nil {
			return err
		}
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: r.addrB.AsSlice(), HardwareAddr: mac})
	})
}

// settle waits until no packet is in transit from a to b, after n packets.
func (r *rig) settle(n int) {
	r.t.Helper()
	nstest.Eventually(r.t, func() error {
		ab, _, err := r.line.Stats()
		if err != nil {
			r.t.Fatal(err)
		}
		if ab.Packets >= uint64(n) && ab.Sent+ab.Lost+ab.Dropped+ab.Refused == ab.Packets {
			return nil
		}
		return fmt.Errorf("of %d packets sent the line counts: %+v", n, ab)
	})
}

// arrivals sends n numbered datagrams of a size and returns the numbers in order of arrival.
func (r *rig) arrivals(n, size int, gap time.Duration) []int {
	r.t.Helper()
	from, to := r.udp()
	r.introduce()
	b := make([]byte, size)
	begin := time.Now()
	for i := range n {
		binary.BigEndian.PutUint32(b, uint32(i))
		if _, err := from.Write(b); err != nil {
			r.t.Fatal(err)
		}
		if i%16 == 0 && gap > 0 {
			time.Sleep(16 * gap)
		}
	}
	r.sending = time.Since(begin)
	r.settle(n) // delivered packets are at the socket, with room for all of them
	var got []int
	control(r.t, to, func(fd int) {
		for b := make([]byte, 2048); ; {
			m, err := unix.Read(fd, b)
			if err != nil && !errors.Is(err, unix.EINTR) {
				return
			}
			if m >= 4 {
				got = append(got, int(binary.BigEndian.Uint32(b)))
			}
		}
	})
	return got
}

// ping measures n round trips of small datagrams. It adds up to twenty times as many until one is short
// enough, because a busy machine may delay all of a few.
func (r *rig) ping(n int, short time.Duration) []time.Duration {
	r.t.Helper()
	from, to := r.udp()
	go func() {
		b := make([]byte, 64)
		for {
			n, addr, err := to.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = to.WriteToUDPAddrPort(b[:n], addr)
		}
	}()
	var out []time.Duration
	b := make([]byte, 64)
	for i := 0; i < n || i < 20*n && slices.Min(out[1:]) > short; i++ {
		begin := time.Now()
		_, _ = from.Write(b)
		_ = from.SetReadDeadline(begin.Add(30 * time.Second))
		if _, err := from.Read(b); err != nil {
			r.t.Fatal(err)
		}
		out = append(out, time.Since(begin))
	}
	return out[1:] // the first one resolves the neighbour
}

// A round trip takes the delay of both directions, and hardly more.
func TestDelay(t *testing.T) {
	r := newRig(t, 1, Line{Delay: 15 * time.Millisecond}, Line{Delay: 25 * time.Millisecond})
	const most = 42 * time.Millisecond
	trips := r.ping(50, most)
	p50, p99, longest := lab.Percentiles(trips)
	ab, ba, err := r.line.Stats()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("round trip p50 %v, p99 %v, max %v; lateness %v/%v/%v there, %v/%v/%v back", p50, p99, longest,
		ab.LatenessP50, ab.LatenessP99, ab.LatenessMax, ba.LatenessP50, ba.LatenessP99, ba.LatenessMax)
	// Never too early, and punctual as far as a shared machine allows.
	if shortest := slices.Min(trips); shortest < 40*time.Millisecond || shortest > most {
		t.Errorf("shortest round trip %v, want 40 ms", shortest)
	}
	if ab.Sent < 50 || ba.Sent < 50 || ab.Lost+ab.Late+ab.Dropped+ab.Refused != 0 {
		t.Errorf("there %+v, back %+v", ab, ba)
	}
}

// Losses and late packets match their probabilities, and Fates predicts them for a seed.
func TestFates(t *testing.T) {
	const n = 20000
	line := Line{Loss: 0.02, Reorder: 0.05, Later: 3 * time.Millisecond}
	r := newRig(t, 7, line, Line{})
	got := r.arrivals(n, 100, 20*time.Microsecond)
	ab, _, err := r.line.Stats()
	if err != nil {
		t.Fatal(err)
	}
	here := map[int]int{}
	for i, v := range got {
		if _, twice := here[v]; twice {
			t.Fatalf("packet %d arrived twice", v)
		}
		here[v] = i
	}
	var lost, late, overtaken int
	f := newFates(line, 7, 0)
	for i := range n {
		fate := f.next()
		at, came := here[i]
		if came == fate.Lost {
			t.Fatalf("packet %d: arrived %v, want fate %+v", i, came, fate)
		}
		if fate.Lost {
			lost++
		} else if fate.Late {
			late++
			if next, ok := here[i+1]; ok && next < at {
				overtaken++
			}
		}
	}
	t.Logf("%d lost, %d late, %d of them overtaken by the next; %+v", lost, late, overtaken, ab)
	if ab.Lost != uint64(lost) || ab.Dropped+ab.Refused != 0 {
		t.Errorf("the line counts %+v", ab)
	}
	within(t, "lost", lost, n, line.Loss)
	within(t, "late", late, n-lost, line.Reorder)
	if overtaken < late*8/10 {
		t.Errorf("%d of %d late packets were overtaken", overtaken, late)
	}
}

// within checks a count of a binomial distribution, to five standard deviations.
func within(t *testing.T, what string, got, n int, p float64) {
	t.Helper()
	want, sigma := float64(n)*p, math.Sqrt(float64(n)*p*(1-p))
	if math.Abs(float64(got)-want) > 5*sigma {
		t.Errorf("%d %s of %d, want %.0f ± %.0f", got, what, n, want, 5*sigma)
	}
}

// Another seed or direction gives other fates. Another probability of reordering leaves the losses
// unchanged.
func TestSeeds(t *testing.T) {
	course := func(l Line, seed uint64, direction int) (lost, late string) {
		f := newFates(l, seed, direction)
		for range 1000 {
			fate := f.next()
			for s, is := range map[*string]bool{&lost: fate.Lost, &late: fate.Late} {
				*s += map[bool]string{true: "x", false: "."}[is]
			}
		}
		return lost, late
	}
	l := Line{Loss: .1, Reorder: .1}
	lost, late := course(l, 1, 0)
	if a, b := course(l, 1, 0); a != lost || b != late {
		t.Error("different fates with the same seed")
	}
	if a, _ := course(l, 2, 0); a == lost {
		t.Error("equal fates with another seed")
	}
	if a, _ := course(l, 1, 1); a == lost {
		t.Error("equal fates in the other direction")
	}
	if a, b := course(Line{Loss: .1, Reorder: .5}, 1, 0); a != lost || b == late {
		t.Error("reordering changes the losses")
	}
}

// A rated line carries its rate, for TCP and for a flood. The queue bounds a packet's wait.
func TestRate(t *testing.T) {
	const rate = 50e6
	for tries := 1; ; tries++ {
		r := newRig(t, 1, Line{Rate: rate, Delay: time.Millisecond}, Line{Delay: time.Millisecond})
		const during = time.Second
		stalls := lab.WatchStalls()
		goodput := r.throughput(during)
		_, _, stall := stalls.Stop()
		ab, _, err := r.line.Stats()
		if err != nil {
			t.Fatal(err)
		}
		// 1448 bytes of 1514 are payload.
		t.Logf("TCP %.1f Mbit/s of %.1f; %+v", goodput/1e6, rate/1e6, ab)
		// Late packets from before may also have arrived in this second.
		if goodput > rate*(1+float64(ab.LatenessMax)/float64(during)) {
			t.Fatalf("TCP has %.1f Mbit/s of a line of %.1f", goodput/1e6, rate/1e6)
		}
		if goodput >= .75*rate {
			return
		}
		// The line reports its own delay by the machine, or this process was delayed: such a second proves
		// nothing about the line.
		if max(ab.LatenessMax, stall) < 50*time.Millisecond || tries == 60 {
			t.Fatalf("TCP has %.1f Mbit/s of a line of %.1f; maximum lateness %v, longest stall of the machine %v", goodput/1e6, rate/1e6, ab.LatenessMax, stall)
		}
		r.close()
	}
}

func TestQueueDrops(t *testing.T) {
	const rate, queue, size = 8e6, 50000, 1000
	r := newRig(t, 1, Line{Rate: rate, Queue: queue}, Line{})
	got := r.arrivals(1000, size, 0)
	ab, _, err := r.line.Stats()
	if err != nil {
		t.Fatal(err)
	}
	// All at once: packets within the queue's size arrive, and packets leaving meanwhile, one each
	// millisecond.
	t.Logf("%d arrived, sent in %v; %+v", len(got), r.sending, ab)
	if len(got) < queue/(size+42) || len(got) > 500+int(r.sending/time.Millisecond) || ab.Dropped+uint64(len(got)) < 1000 {
		t.Errorf("%d packets of 1000 passed a queue of %d bytes", len(got), queue)
	}
}

// throughput returns TCP's throughput from a to b, in bits of payload a second.
func (r *rig) throughput(d time.Duration) float64 {
	r.t.Helper()
	var ln net.Listener
	r.do(r.b, func() (err error) {
		ln, err = net.ListenTCP("tcp4", &net.TCPAddr{IP: r.addrB.AsSlice(), Port: 7001})
		return err
	})
	defer ln.Close()
	var c net.Conn
	r.do(r.a, func() (err error) {
		c, err = net.DialTCP("tcp4", nil, ln.Addr().(*net.TCPAddr))
		return err
	})
	defer c.Close()
	s, err := ln.Accept()
	if err != nil {
		r.t.Fatal(err)
	}
	defer s.Close()
	go func() {
		b := make([]byte, 256<<10)
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}()
	b := make([]byte, 256<<10)
	_ = s.SetReadDeadline(time.Now().Add(60 * time.Second))
	if _, err := io.ReadFull(s, b); err != nil { // it is in transit
		r.t.Fatal(err)
	}
	// Count arrivals, not reads: a late reader finds earlier arrivals.
	waiting := func() (n int) {
		control(r.t, s.(*net.TCPConn), func(fd int) { n, _ = unix.IoctlGetInt(fd, unix.TIOCINQ) })
		return n
	}
	begin := time.Now()
	n := -waiting()
	for time.Since(begin) < d {
		m, err := s.Read(b)
		if err != nil {
			r.t.Fatal(err)
		}
		n += m
	}
	n += waiting()
	return float64(n) * 8 / time.Since(begin).Seconds()
}

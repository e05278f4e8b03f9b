// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"encoding/binary"
	"io"
	"math"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

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
}

func newRig(t testing.TB, seed uint64, ab, ba Line) *rig {
	t.Helper()
	r := newEnds(t, seed)
	var err error
	if r.line, err = NewTwo(r.env, r.a, r.b, ab, ba); err != nil {
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
	t.Cleanup(func() {
		env.Close()
		if left := env.Leftovers(); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	r := &rig{t: t, env: env, addrA: netip.MustParseAddr("10.3.0.1"), addrB: netip.MustParseAddr("10.3.0.2")}
	for _, e := range []struct {
		end  *topo.End
		name string
		addr netip.Addr
	}{{&r.a, "a", r.addrA}, {&r.b, "b", r.addrB}} {
		h, _, err := env.Namespace(e.name)
		if err != nil {
			t.Fatal(err)
		}
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
	_ = to.SetReadBuffer(8 << 20)
	r.t.Cleanup(func() { from.Close(); to.Close() })
	return from, to
}

// arrivals sends n numbered datagrams of a size and returns the numbers in the order in
// which they came.
func (r *rig) arrivals(n, size int, gap time.Duration) []int {
	r.t.Helper()
	from, to := r.udp()
	// The neighbour is found before the first one counts: packets that wait for it are few.
	done := make(chan []int)
	go func() {
		var got []int
		b := make([]byte, 2048)
		for {
			_ = to.SetReadDeadline(time.Now().Add(time.Second))
			m, err := to.Read(b)
			if err != nil {
				done <- got
				return
			}
			if m >= 4 {
				got = append(got, int(binary.BigEndian.Uint32(b)))
			}
		}
	}()
	b := make([]byte, size)
	for i := range n {
		binary.BigEndian.PutUint32(b, uint32(i))
		if _, err := from.Write(b); err != nil {
			r.t.Fatal(err)
		}
		if i == 0 { // the neighbour is found now: few packets can wait for it
			time.Sleep(50 * time.Millisecond)
		} else if i%16 == 0 && gap > 0 {
			time.Sleep(16 * gap)
		}
	}
	return <-done
}

// ping measures round trips of small datagrams.
func (r *rig) ping(n int) []time.Duration {
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
	for range n {
		begin := time.Now()
		_, _ = from.Write(b)
		_ = from.SetReadDeadline(begin.Add(5 * time.Second))
		if _, err := from.Read(b); err != nil {
			r.t.Fatal(err)
		}
		out = append(out, time.Since(begin))
	}
	return out[1:] // the first one finds the neighbour
}

// A round trip takes what both directions take, and hardly more.
func TestDelay(t *testing.T) {
	r := newRig(t, 1, Line{Delay: 15 * time.Millisecond}, Line{Delay: 25 * time.Millisecond})
	trips := r.ping(50)
	p50, p99, most := lab.Percentiles(trips)
	ab, ba, err := r.line.Stats()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("round trip p50 %v, p99 %v, max %v; lateness %v/%v/%v there, %v/%v/%v back", p50, p99, most,
		ab.LatenessP50, ab.LatenessP99, ab.LatenessMax, ba.LatenessP50, ba.LatenessP99, ba.LatenessMax)
	// Never too early; and as punctual as the line can be where the machine lets it, which others use, too.
	if shortest := slices.Min(trips); shortest < 40*time.Millisecond || shortest > 42*time.Millisecond {
		t.Errorf("shortest round trip %v, want 40 ms", shortest)
	}
	if ab.Sent < 50 || ba.Sent < 50 || ab.Lost+ab.Late+ab.Dropped+ab.Refused != 0 {
		t.Errorf("there %+v, back %+v", ab, ba)
	}
}

// Losses and late packets are as many as their probabilities say, and the same ones for
// the same seed: those that Fates foretells.
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
			t.Fatalf("packet %d came twice", v)
		}
		here[v] = i
	}
	var lost, late, overtaken int
	f := NewFates(line, 7, 0)
	for i := range n {
		fate := f.Next()
		at, came := here[i]
		if came == fate.Lost {
			t.Fatalf("packet %d: arrived %v, but its fate is %+v", i, came, fate)
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

// Another seed or the other direction is another course; another probability of
// reordering leaves the same packets lost.
func TestSeeds(t *testing.T) {
	course := func(l Line, seed uint64, direction int) (lost, late string) {
		f := NewFates(l, seed, direction)
		for range 1000 {
			fate := f.Next()
			for s, is := range map[*string]bool{&lost: fate.Lost, &late: fate.Late} {
				*s += map[bool]string{true: "x", false: "."}[is]
			}
		}
		return lost, late
	}
	l := Line{Loss: .1, Reorder: .1}
	lost, late := course(l, 1, 0)
	if a, b := course(l, 1, 0); a != lost || b != late {
		t.Error("the same seed decides differently")
	}
	if a, _ := course(l, 2, 0); a == lost {
		t.Error("another seed decides the same")
	}
	if a, _ := course(l, 1, 1); a == lost {
		t.Error("the other direction decides the same")
	}
	if a, b := course(Line{Loss: .1, Reorder: .5}, 1, 0); a != lost || b == late {
		t.Error("reordering has a say in losses")
	}
}

// A rated line carries what it is rated for, to TCP and to a flood; the queue bounds
// how long a packet waits.
func TestRate(t *testing.T) {
	const rate = 50e6
	r := newRig(t, 1, Line{Rate: rate, Delay: time.Millisecond}, Line{Delay: time.Millisecond})
	goodput := r.throughput(time.Second)
	ab, _, err := r.line.Stats()
	if err != nil {
		t.Fatal(err)
	}
	// 1448 bytes of 1514 are payload.
	t.Logf("TCP %.1f Mbit/s of %.1f; %+v", goodput/1e6, rate/1e6, ab)
	if goodput < .75*rate || goodput > rate {
		t.Errorf("TCP has %.1f Mbit/s of a line of %.1f", goodput/1e6, rate/1e6)
	}
}

func TestQueueDrops(t *testing.T) {
	const rate, queue, size = 8e6, 50000, 1000
	r := newRig(t, 1, Line{Rate: rate, Queue: queue}, Line{})
	begin := time.Now()
	got := r.arrivals(1000, size, 0)
	ab, _, err := r.line.Stats()
	if err != nil {
		t.Fatal(err)
	}
	// All at once: what fits the queue comes, and what left it while the others came.
	t.Logf("%d came in %v; %+v", len(got), time.Since(begin), ab)
	if len(got) < queue/(size+42) || len(got) > 500 || ab.Dropped+uint64(len(got)) < 1000 {
		t.Errorf("%d packets of 1000 came through a queue of %d bytes", len(got), queue)
	}
}

// throughput is TCP's, in bits of payload a second, from a to b.
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
	_ = s.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.ReadFull(s, b); err != nil { // it is under way
		r.t.Fatal(err)
	}
	begin, n := time.Now(), 0
	for time.Since(begin) < d {
		m, err := s.Read(b)
		if err != nil {
			r.t.Fatal(err)
		}
		n += m
	}
	return float64(n) * 8 / time.Since(begin).Seconds()
}

// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/weir-project/weir/lab"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "handoff-balance",
		Short: "two servers share their load by moving sessions; one of them is overloaded",
		Run:   runBalance,
	})
}

// setting is a pair of runs, with moving and without: the same requests at the same moments.
type setting struct {
	name      string
	workers   int
	requests  int           // of a connection
	threshold int           // waiting sessions
	light     float64       // load of each server, relative to its capacity
	heavy     float64       // additional load of the first server by a few clients, relative to its capacity
	work      time.Duration // of a request, mean of an exponential distribution
	times     int           // duration, relative to the other setting
}

var (
	// The first server's load is a quarter above its capacity. Without moving, its queue grows for the
	// whole run, and so does the ratio's denominator. The 99th percentile is 0.28 s in a run of 3.6 s, and
	// 0.54 s in one of 6 s.
	skewed = setting{name: "skewed", workers: 8, requests: 8, threshold: 4, light: 0.35, heavy: 0.9, work: 16 * time.Millisecond, times: 2}
	even   = setting{name: "even", workers: 8, requests: 8, threshold: 4, light: 0.7, work: 16 * time.Millisecond, times: 1}
)

// heavyClients is the number of overloading clients. Connections of one client go to one server, as with
// hashing by source.
const heavyClients = 3

type balance struct {
	*world
	result *lab.Result
	port   uint16 // of the next client
	moved  uint64
	failed int
}

func runBalance(ctx context.Context, e *lab.Env, r *lab.Result) error {
	w, err := newWorld(e, "balance", 2)
	if err != nil {
		return err
	}
	if err := w.wire(); err != nil {
		return err
	}
	if err := w.startLB(); err != nil {
		return err
	}
	for _, h := range w.servers {
		if err := h.startBackend(); err != nil {
			return err
		}
	}
	if err := w.connected(); err != nil {
		return err
	}
	b := &balance{world: w, result: r, port: 10000}
	rounds, long := 3, 3*time.Second
	switch e.Size {
	case lab.Full:
		rounds, long = 5, 8*time.Second
	case lab.Smoke:
		rounds, long = 1, 1500*time.Millisecond
	}
	var curves []curve
	err = r.WithStalls(func() error {
		for _, s := range []setting{skewed, even} {
			c, err := b.compare(ctx, s, rounds, time.Duration(s.times)*long)
			if err != nil {
				return err
			}
			curves = append(curves, c...)
		}
		if e.Size == lab.Full {
			return b.table(ctx, long)
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.Set("failed", float64(b.failed))
	r.Set("moved", float64(b.moved))
	r.Claim(lab.Correctness, "requests without the right answer", "failed", "== 0")
	r.Claim(lab.Correctness, "moved sessions", "moved", "> 0")
	if e.Size == lab.Smoke {
		return nil
	}
	r.Claim(lab.Performance, "99th percentile of the latency, with moving relative to without, with a few overloading clients", "p99_ratio", "<= 0.3")
	r.Claim(lab.Performance, "the same with equal load on both servers", "p99_ratio_even", "<= 1.05")
	return draw(e, curves)
}

// compare runs a setting with moving and without in turn.
func (b *balance) compare(ctx context.Context, s setting, rounds int, long time.Duration) ([]curve, error) {
	with, without := curve{name: s.name + ", moving", solid: true}, curve{name: s.name + ", not moving"}
	var ratios, ratios50 []float64
	for i := range rounds {
		seed := b.env.Seed + uint64(i)
		order := []*curve{&without, &with}
		if i%2 == 1 {
			slices.Reverse(order)
		}
		var p50, p99 [2]time.Duration
		for _, c := range order {
			one := s
			at := 0
			if c != &with {
				one.threshold, at = 0, 1
			}
			b.env.Watch.Log("%s, round %d of %d", c.name, i+1, rounds)
			d, err := b.run(ctx, one, seed, long)
			if err != nil {
				return nil, err
			}
			c.times = append(c.times, d...)
			p50[at], p99[at], _ = lab.Percentiles(d)
		}
		ratios = append(ratios, float64(p99[0])/float64(p99[1]))
		ratios50 = append(ratios50, float64(p50[0])/float64(p50[1]))
	}
	suffix := ""
	if s.name != skewed.name {
		suffix = "_" + s.name
	}
	var work []time.Duration
	for _, a := range s.arrivals(b.env.Seed, long) {
		work = append(work, a.work...)
	}
	times(b.result, "work_ms_"+s.name, work) // the lower bound for any balance
	b.result.Set("p99_ratio"+suffix, median(ratios))
	b.result.Set("p50_ratio"+suffix, median(ratios50))
	times(b.result, "latency_ms_moving_"+s.name, with.times)
	times(b.result, "latency_ms_not_"+s.name, without.times)
	return []curve{with, without}, nil
}

// table varies one parameter at a time.
func (b *balance) table(ctx context.Context, long time.Duration) error {
	vary := func(name string, s setting) error {
		var p99 [2]time.Duration
		for i, t := range []int{s.threshold, 0} {
			s.threshold = t
			d, err := b.run(ctx, s, b.env.Seed, long)
			if err != nil {
				return err
			}
			_, p99[i], _ = lab.Percentiles(d)
		}
		b.result.Set("p99_ratio_"+name, float64(p99[0])/float64(p99[1]))
		return nil
	}
	for _, n := range []int{4, 16} {
		s := skewed
		s.workers = n
		if err := vary(fmt.Sprintf("workers_%d", n), s); err != nil {
			return err
		}
	}
	for _, n := range []int{1, 4, 32} {
		s := skewed
		s.requests = n
		if err := vary(fmt.Sprintf("requests_%d", n), s); err != nil {
			return err
		}
	}
	for _, n := range []int{1, 2, 8, 16} {
		s := skewed
		s.threshold = n
		if err := vary(fmt.Sprintf("threshold_%d", n), s); err != nil {
			return err
		}
	}
	return nil
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if len(v) == 0 {
		return 0
	}
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// arrival is a connection opened by a client.
type arrival struct {
	at   time.Duration
	host int
	work []time.Duration
}

// arrivals draws the connections of a run: Poisson processes of light clients at each server, and of heavy
// ones at the first.
func (s setting) arrivals(seed uint64, long time.Duration) (all []arrival) {
	add := func(stream uint64, host int, share float64) {
		if share == 0 {
			return
		}
		r := rand.New(rand.NewPCG(seed, stream))
		each := time.Duration(float64(s.requests) * float64(s.work) / float64(s.workers) / share)
		for at := time.Duration(0); ; {
			at += time.Duration(r.ExpFloat64() * float64(each))
			if at > long {
				return
			}
			a := arrival{at: at, host: host}
			for range s.requests {
				a.work = append(a.work, time.Duration(r.ExpFloat64()*float64(s.work)))
			}
			all = append(all, a)
		}
	}
	add(1, 1, s.light)
	add(2, 2, s.light)
	for i := range heavyClients {
		add(uint64(3+i), 1, s.heavy/heavyClients)
	}
	slices.SortFunc(all, func(a, b arrival) int { return int(a.at - b.at) })
	return all
}

// run sends clients' requests for a while, and returns the latency of each request.
func (b *balance) run(ctx context.Context, s setting, seed uint64, long time.Duration) ([]time.Duration, error) {
	for _, h := range b.servers {
		var err error
		h.member, err = b.play(h.site, "workers", workersRole{Keeper: h.socket(), Listen: serviceAt, Workers: s.workers, Threshold: s.threshold}, nil)
		if err != nil {
			return nil, err
		}
	}
	moved := func() (n uint64, err error) {
		for _, h := range b.servers {
			st, err := h.status()
			if err != nil {
				return 0, err
			}
			n += st.Out
		}
		return n, nil
	}
	before, err := moved()
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	var took []time.Duration
	var errs []error
	var all sync.WaitGroup
	begin := time.Now()
	for _, a := range s.arrivals(seed, long) {
		if ctx.Err() != nil {
			break
		}
		time.Sleep(time.Until(begin.Add(a.at)))
		b.port++
		from := b.port
		all.Go(func() {
			d, err := b.connection(from, a)
			mu.Lock()
			defer mu.Unlock()
			took = append(took, d...)
			if err != nil {
				b.failed += len(a.work) - len(d)
				errs = append(errs, err)
			}
		})
	}
	all.Wait()
	for _, err := range errs[:min(3, len(errs))] {
		b.result.Note("%s, threshold %d: %v", s.name, s.threshold, err)
	}
	after, err := moved()
	if err != nil {
		return nil, err
	}
	b.moved += after - before
	for _, h := range b.servers {
		h.member.in.Close() // it ends
		select {
		case <-h.member.Done():
		case <-time.After(patience):
			return nil, errors.New("a server's workers did not end")
		}
	}
	return took, ctx.Err()
}

// connection sends one request after the other.
func (b *balance) connection(from uint16, a arrival) (took []time.Duration, err error) {
	local := netip.AddrPortFrom(netip.MustParseAddr("10.1.0.2"), from)
	if err := b.override(context.Background(), local, b.servers[a.host-1]); err != nil {
		return nil, err
	}
	var c net.Conn
	err = b.client.Do(func() (err error) {
		c, err = (&net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(local), Timeout: patience}).Dial("tcp", serviceAt.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	for i, work := range a.work {
		began := time.Now()
		if err := c.SetDeadline(began.Add(patience)); err != nil {
			return took, err
		}
		if _, err := c.Write(binary.BigEndian.AppendUint32(nil, uint32(work.Microseconds()))); err != nil {
			return took, err
		}
		var got [answerSize]byte
		if _, err := io.ReadFull(c, got[:]); err != nil {
			return took, fmt.Errorf("request %d: %w", i+1, err)
		}
		if n := binary.BigEndian.Uint32(got[:]); n != uint32(i+1) {
			return took, fmt.Errorf("request %d got the answer of request %d", i+1, n)
		}
		took = append(took, time.Since(began))
	}
	return took, nil
}

// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/guard/scenario"
	"github.com/weir-project/weir/lab/guard/rakelimit"
)

// never is a limit above all traffic here. Every packet passes, through every step of a passing packet.
const never = 10_000_000

// measureCost compares the cost of a passing packet in two ways. In the first each packet is a run of the
// socket's program, with caches as cold as after the kernel's own work. In the second thousands of packets
// share one run of the same algorithm without the parsing, with warm caches. The kernel times the program
// alone (BPF_ENABLE_STATS). The cost of an empty program covers the kernel's own share and the loop, and is
// subtracted.
func (x *experiment) measureCost(ctx context.Context) error {
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return fmt.Errorf("enable program statistics of the kernel (Linux 5.8): %w", err)
	}
	defer stats.Close()
	for _, k := range kinds {
		x.say("cost of a passing packet, %s: %d rounds", k.about, x.rounds)
		for _, loop := range []bool{false, true} {
			if err := x.compareCost(ctx, k, loop); err != nil {
				return err
			}
		}
	}
	return nil
}

// round is the number of packets decided in one turn.
const round = 2000

// kind describes the measured packets.
type kind struct {
	name     string // suffix of the metrics, after "ns" and "ns_ratio_rakelimit"
	about    string
	scenario string        // scenario of their sources
	gap      time.Duration // interval between two packets
	ipv6     bool
	random   bool // a new source for each packet
	packets  int  // number in turn
}

// For unknown sources the rate matters: a guard remembers a number of them a second, and this is work.
var kinds = []kind{
	{"", "random sources at 1,000,000 pps", "spoofed_1m", time.Microsecond, false, true, 1},
	{"_ipv6", "random IPv6 sources at 1,000,000 pps", "v6_spoofed", time.Microsecond, true, true, 1},
	{"_slow", "random sources at 100,000 pps", "spoofed_1m", 10 * time.Microsecond, false, true, 1},
	{"_clients", "200 clients at 1,000,000 pps", "no_attack", time.Microsecond, false, false, 4096},
}

// stream is an endless sequence of packets, either from a scenario's few sources without an attack, in
// turn, or from a source drawn for each. The packets are drawn and not read from a trace: its megabytes
// would evict the limiter's tables from the CPU's caches, unlike real packets.
type stream struct {
	packets []scenario.Packet
	drawn   *rand.Rand // nil: in turn
	at, gap uint64
	i       int
}

func newStream(k kind, s scenario.Scenario, seed uint64) *stream {
	t := s.Trace(seed)
	t.Skip(s.From)
	packets := make([]scenario.Packet, k.packets)
	packets = packets[:t.Next(packets)]
	out := &stream{packets: packets, at: packets[0].At, gap: uint64(k.gap)}
	if k.random {
		out.drawn = rand.New(rand.NewPCG(seed, 0))
	}
	return out
}

func (s *stream) next() *scenario.Packet {
	p := &s.packets[s.i%len(s.packets)]
	s.i++
	s.at += s.gap
	p.At = s.at
	if s.drawn != nil {
		n := s.drawn.Uint64()
		p.Src = scenario.Source{Identity: uint32(n), Host: uint32(n >> 32)}
		p.SrcPort = uint16(n >> 24)
	}
	return p
}

// meter is one way to decide, with the average cost of its packets in each round.
type meter struct {
	program *ebpf.Program
	decide  func(n int) error // decides n packets
	each    int               // packets for each run of program
	ns      []float64
}

var errDropped = errors.New("a packet was dropped below the limit; the cost covers passing packets only")

// single uses a run for each packet.
func single(l limiter, s *stream) *meter {
	return &meter{program: l.Program(), each: 1, decide: func(n int) error {
		for range n {
			if passed, err := l.One(s.next()); err != nil || !passed {
				return cmp.Or(err, errDropped)
			}
		}
		return nil
	}}
}

// loop uses a run for each batch.
func loop(l limiter, s *stream) *meter {
	packets, verdicts := make([]scenario.Packet, batch), make([]bool, batch)
	return &meter{program: l.BatchProgram(), each: batch, decide: func(n int) error {
		for range n / batch {
			for i := range packets {
				packets[i] = *s.next()
			}
			if err := l.Decide(packets, verdicts); err != nil {
				return err
			}
			if slices.Contains(verdicts, false) {
				return errDropped
			}
		}
		return nil
	}}
}

// batch is the number of packets in a run, for both sides.
const batch = 4096

// nothing decides nothing, in the same number of runs.
func nothing(l *rakelimit.Limiter, s *stream, each int) (*meter, error) {
	frame := slices.Clone(l.Frame(s.next()))
	m := &meter{program: l.Empty(), each: each}
	if each > 1 {
		m.program = l.EmptyBatch()
		// The empty program repeats this batch.
		if err := loop(rake{l}, s).decide(each); err != nil {
			return nil, err
		}
	}
	m.decide = func(n int) error {
		for range n / each {
			if _, err := m.program.Run(&ebpf.RunOptions{Data: frame}); err != nil {
				return err
			}
		}
		return nil
	}
	return m, nil
}

// compareCost measures both sides and the empty program in turn, so a slow machine slows all of them.
func (x *experiment) compareCost(ctx context.Context, k kind, looped bool) error {
	s, err := scenario.Lookup(k.scenario)
	if err != nil {
		return err
	}
	way, each := single, 1
	if looped {
		way, each = loop, batch
		k.name += "_loop"
	}
	var meters []*meter
	for _, who := range []*side{x.ours, &theirs} {
		l, err := who.limiter(never, k.ipv6, x.env.Seed)
		if err != nil {
			return err
		}
		defer l.Close()
		meters = append(meters, way(l, newStream(k, s, x.env.Seed)))
	}
	idle, err := rakelimit.New(rakelimit.Options{IPv6: k.ipv6})
	if err != nil {
		return err
	}
	defer idle.Close()
	m, err := nothing(idle, newStream(k, s, x.env.Seed), each)
	if err != nil {
		return err
	}
	meters = append(meters, m)
	for i := range x.rounds {
		for turn := range meters {
			if err := meters[(turn+i)%len(meters)].round(); err != nil {
				return err
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	x.costs(k, meters)
	return nil
}

// round measures one round, after a short one to bring the caches into this way's state.
func (m *meter) round() error {
	n := max(round, 4*m.each)
	if err := m.decide(n / 4); err != nil {
		return err
	}
	before, err := m.program.Stats()
	if err != nil {
		return err
	}
	if err := m.decide(n); err != nil {
		return err
	}
	after, err := m.program.Stats()
	if err != nil {
		return err
	}
	if runs := after.RunCount - before.RunCount; runs != uint64(n/m.each) {
		return fmt.Errorf("the kernel counted %d runs, want %d", runs, n/m.each)
	}
	m.ns = append(m.ns, float64(after.Runtime-before.Runtime)/float64(n))
	return nil
}

// costs sets the metrics: medians of the rounds, minus the median of the empty program.
func (x *experiment) costs(k kind, meters []*meter) {
	idle := median(meters[2].ns)
	ours, others := median(meters[0].ns)-idle, median(meters[1].ns)-idle
	x.result.Set("ns"+k.name, ours)
	x.result.Set("rakelimit_ns"+k.name, others)
	x.result.Set("ns_empty"+k.name, idle)
	if others > 0 {
		x.result.Set("ns_ratio_rakelimit"+k.name, ours/others)
	}
}

// median sorts a copy. For an even number it returns the mean of the middle two.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/guard/scenario"
	"github.com/weir-project/weir/lab/guard/rakelimit"
)

// never is a limit that no traffic here reaches: everything passes, and takes every step that a packet which passes can.
const never = 10_000_000

// measureCost compares what a packet that passes costs: random sources, each packet another line of every table, and
// clients that are known. The kernel itself takes the time, of the program alone (BPF_ENABLE_STATS); what it adds is
// what it takes for a program that does nothing.
func (x *experiment) measureCost(ctx context.Context) error {
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return fmt.Errorf("have the kernel measure programs (Linux 5.8): %w", err)
	}
	defer stats.Close()
	for _, k := range kinds {
		x.say("what does a packet cost that passes, of %s? %d rounds", k.about, x.rounds)
		if err := x.compareCost(ctx, k); err != nil {
			return err
		}
	}
	return nil
}

// round is how many packets each decides before it is the next one's turn.
const round = 2000

// kind is the packets that are measured.
type kind struct {
	name     string // of the metrics, behind "ns" and "ns_ratio_rakelimit"
	about    string
	scenario string        // whose sources they have
	gap      time.Duration // between two of them
}

// Of strangers it matters how fast they come: a guard remembers so many of them a second, and that is work.
var kinds = []kind{
	{"", "random sources at 1,000,000 pps", "spoofed_1m", time.Microsecond},
	{"_slow", "random sources at 100,000 pps", "spoofed_1m", 10 * time.Microsecond},
	{"_clients", "200 clients at 1,000,000 pps", "no_attack", time.Microsecond},
}

// stream is packets without end, as a trace has them from its attack on.
type stream struct {
	packets []scenario.Packet
	at, gap uint64
	i       int
}

func newStream(s scenario.Scenario, gap time.Duration, seed uint64) *stream {
	t := s.Trace(seed)
	t.Skip(s.From)
	packets := make([]scenario.Packet, 1<<17)
	packets = packets[:t.Next(packets)]
	return &stream{packets: packets, at: packets[0].At, gap: uint64(gap)}
}

func (s *stream) next() *scenario.Packet {
	p := &s.packets[s.i%len(s.packets)]
	s.i++
	s.at += s.gap
	p.At = s.at
	return p
}

// meter is one way to decide, and what its packets cost on average in each round.
type meter struct {
	name    string
	program *ebpf.Program
	decide  func(*scenario.Packet) error
	stream  *stream
	ns      []float64
}

func (x *experiment) compareCost(ctx context.Context, k kind) error {
	s, err := scenario.Lookup(k.scenario)
	if err != nil {
		return err
	}
	var meters []*meter
	for _, who := range []*side{x.ours, &theirs} {
		l, err := who.limiter(never, false, x.env.Seed)
		if err != nil {
			return err
		}
		defer l.Close()
		meters = append(meters, &meter{name: who.name, program: l.Program(), stream: newStream(s, k.gap, x.env.Seed), decide: func(p *scenario.Packet) error {
			passed, err := l.One(p)
			if err == nil && !passed {
				err = fmt.Errorf("%sguard: a packet was dropped below the limit, and only those that pass are measured", who.name)
			}
			return err
		}})
	}
	empty, err := rakelimit.New(rakelimit.Options{})
	if err != nil {
		return err
	}
	defer empty.Close()
	frame := empty.Frame(&scenario.Packet{})
	meters = append(meters, &meter{program: empty.Empty(), stream: newStream(s, k.gap, x.env.Seed), decide: func(*scenario.Packet) error {
		_, err := empty.Empty().Run(&ebpf.RunOptions{Data: frame})
		return err
	}})
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

// round measures one round, after a short one that brings caches to where this way leaves them.
func (m *meter) round() error {
	for range round / 4 {
		if err := m.decide(m.stream.next()); err != nil {
			return err
		}
	}
	before, err := m.program.Stats()
	if err != nil {
		return err
	}
	for range round {
		if err := m.decide(m.stream.next()); err != nil {
			return err
		}
	}
	after, err := m.program.Stats()
	if err != nil {
		return err
	}
	runs := after.RunCount - before.RunCount
	if runs != round {
		return fmt.Errorf("the kernel counted %d runs of %d", runs, round)
	}
	m.ns = append(m.ns, float64(after.Runtime-before.Runtime)/float64(runs)/float64(time.Nanosecond))
	return nil
}

// costs sets the metrics: medians of the rounds, less the median of nothing.
func (x *experiment) costs(k kind, meters []*meter) {
	nothing := median(meters[2].ns)
	ours, others := median(meters[0].ns)-nothing, median(meters[1].ns)-nothing
	x.result.Set("ns"+k.name, ours)
	x.result.Set("rakelimit_ns"+k.name, others)
	x.result.Set("ns_empty"+k.name, nothing)
	if others > 0 {
		x.result.Set("ns_ratio_rakelimit"+k.name, ours/others)
	}
}

// median sorts a copy. Of an even number it is the mean of the two in the middle.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// SPDX-License-Identifier: Apache-2.0

package reroutestress

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

const many = 200

// cost measures the CPU time of many sessions, with them and without in turn, so both include the machine's
// other work. Both ends are on it, so one end is half of the difference.
func (x *experiment) cost(ctx context.Context) error {
	x.say("cost of %d sessions every 10 ms: %d rounds with and without", many, x.rounds)
	if err := errors.Join(x.endBFD(ctx), x.world.only(ctx, nil, nil)); err != nil {
		return err
	}
	var near, far []liveness.Session
	for i := range many {
		n, f := x.world.session(fmt.Sprint("many", i), uint32(100+i), linkMany, 10*time.Millisecond)
		n.Observe, f.Observe = i > 0, i > 0
		near, far = append(near, n), append(far, f)
	}
	if err := x.world.only(ctx, near, far); err != nil {
		return err
	}
	if err := x.waitMany(ctx); err != nil {
		return err
	}
	var busy, softirq []float64
	for range x.rounds {
		with, err := x.share(ctx)
		if err != nil {
			return err
		}
		without, err := x.without(ctx)
		if err != nil {
			return err
		}
		softirq = append(softirq, (with.softirq-without.softirq)/2*100)
		// With hardly idle CPUs, other processes use the time left by the sessions.
		if min(with.idle, without.idle) > 0.1 {
			busy = append(busy, (with.busy-without.busy)/2*100)
		}
	}
	x.result.Set("sessions_200_softirq_percent", middle(softirq))
	used := busy
	if len(busy) < x.rounds/2 {
		x.result.Note("of %d rounds only %d show the busy time, because other work used all CPUs: sessions_200_cpu_percent covers soft interrupts alone, where probes are sent and answered", x.rounds, len(busy))
		used = softirq
	}
	x.result.Set("sessions_200_cpu_percent", middle(used))
	slices.Sort(used)
	x.result.Set("sessions_200_cpu_percent_quartile_low", used[len(used)/4])
	x.result.Set("sessions_200_cpu_percent_quartile_high", used[len(used)*3/4])
	return nil
}

// middle returns the mean of the middle half.
func middle(v []float64) (mean float64) {
	sorted := slices.Sorted(slices.Values(v))
	half := sorted[len(sorted)/4 : len(sorted)-len(sorted)/4]
	for _, v := range half {
		mean += v / float64(len(half))
	}
	return mean
}

// without measures with no packets, no verdicts and no supervision. The loops end, and restart afterwards.
func (x *experiment) without(ctx context.Context) (s share, err error) {
	if err := errors.Join(x.world.serve.Signal(syscall.SIGSTOP), x.world.silence()); err != nil {
		return s, err
	}
	s, err = x.share(ctx)
	return s, errors.Join(err, x.world.restartLoops(ctx), x.waitBeats(ctx), x.world.serve.Signal(syscall.SIGCONT))
}

// silence marks the tick sources of both ends (struct liveness_tick_source) as without loops: their packets
// end at the next tick.
func (w *world) silence() error {
	for _, ns := range []*netns.Handle{w.near, w.far} {
		i := kernel.Instance{Scope: fmt.Sprint(ns.Inode()), Feature: liveness.Name, Name: "@liveness"}
		o, err := w.root.OpenMapsForWriting(i, "clockwork")
		if err != nil {
			return err
		}
		defer o.Close()
		m, err := o.Maps["clockwork"].LookupBytes(uint32(0))
		if err != nil {
			return err
		}
		clear(m[8:12])
		if err := o.Maps["clockwork"].Put(uint32(0), m); err != nil {
			return err
		}
	}
	return nil
}

// restartLoops restarts the loops.
func (w *world) restartLoops(ctx context.Context) error {
	l, err := w.root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	return liveness.Recover(l)
}

// waitBeats waits until the loops run.
func (x *experiment) waitBeats(ctx context.Context) error {
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		st, err := liveness.ReadState(ctx, x.world.root)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(st.TimerLoops, func(l liveness.TimerLoopState) bool { return l.Silent > 50*time.Millisecond }) && len(st.TimerLoops) > 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("loops do not run: %+v", st.TimerLoops)
		}
	}
}

// only makes both ends probe these sessions and no others.
func (w *world) only(ctx context.Context, near, far []liveness.Session) error {
	return errors.Join(w.apply(ctx, w.nearNS, 0, near...), w.apply(ctx, w.farNS, 1, far...))
}

// waitMany waits until all of them are up.
func (x *experiment) waitMany(ctx context.Context) error {
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		err := x.world.up(ctx)
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(end) {
			return err
		}
	}
}

// share is the number of busy CPUs during a round, the part with soft interrupts, and the number of idle
// CPUs. The rest was taken by the hypervisor.
type share struct{ busy, softirq, idle float64 }

func (x *experiment) share(ctx context.Context) (s share, err error) {
	before, err := readUsage()
	if err != nil {
		return s, err
	}
	select {
	case <-ctx.Done():
		return s, ctx.Err()
	case <-time.After(x.round):
	}
	after, err := readUsage()
	took := after.at.Sub(before.at).Seconds()
	return share{(after.busy - before.busy).Seconds() / took, (after.softirq - before.softirq).Seconds() / took, (after.idle - before.idle).Seconds() / took}, err
}

// userHz is the unit of /proc/stat.
const userHz = 100

// usage is the CPUs' use since a fixed moment.
type usage struct {
	busy, softirq, idle time.Duration
	at                  time.Time
}

// readUsage reads proc(5)'s stat. The kernel measures idle time exactly where ticks stop, and the
// hypervisor's share (steal), and samples the rest. Busy is therefore the remainder of both. Hard
// interrupts count as soft interrupts: a loop's clock is one.
func readUsage() (u usage, err error) {
	u.at = time.Now()
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return u, err
	}
	cpus, stolen := 0, time.Duration(0)
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 9 || !strings.HasPrefix(f[0], "cpu") || f[0] == "cpu" {
			continue
		}
		cpus++
		for field, to := range map[int]*time.Duration{4: &u.idle, 5: &u.idle, 6: &u.softirq, 7: &u.softirq, 8: &stolen} {
			n, err := strconv.ParseInt(f[field], 10, 64)
			if err != nil {
				return u, fmt.Errorf("/proc/stat: %q", line)
			}
			*to += time.Duration(n) * time.Second / userHz
		}
	}
	u.busy = time.Duration(cpus)*u.at.Sub(epoch) - u.idle - stolen
	return u, nil
}

var epoch = time.Now()

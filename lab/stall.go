// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// Stalls measures scheduling delays of the machine itself. On each CPU a bound thread sleeps 1 ms at a time
// and records its wake-up delay. Experiments compare their latencies with it, because a busy machine must
// not be charged to weir.
type Stalls struct {
	stop  atomic.Bool
	wg    sync.WaitGroup
	mu    sync.Mutex
	late  []time.Duration
	times []stall
}

// stall is an interval without a run of the due thread on a CPU: CLOCK_MONOTONIC, ns.
type stall struct{ from, to uint64 }

// WatchStalls starts measuring.
func WatchStalls() *Stalls { return watchStalls(false) }

// WatchHost starts measuring with threads above all others (SCHED_FIFO, where allowed). Delays of these
// threads also delay the kernel's own timers. Their causes are a stalled host, or interrupts.
func WatchHost() *Stalls { return watchStalls(true) }

func watchStalls(first bool) *Stalls {
	s := &Stalls{}
	for cpu := range runtime.NumCPU() {
		s.wg.Go(func() { s.watch(cpu, first) })
	}
	return s
}

func (s *Stalls) watch(cpu int, first bool) {
	runtime.LockOSThread() // never unlocked: the thread is bound to a CPU and must not serve other goroutines
	var set unix.CPUSet
	set.Set(cpu)
	_ = unix.SchedSetaffinity(0, &set) // some containers refuse: it then measures any CPU
	if first {
		_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 99}, 0)
	}
	const nap = uint64(time.Millisecond)
	var late []time.Duration
	var times []stall
	for i := 1; !s.stop.Load(); i++ {
		if i%8 == 0 {
			// Go's monitor takes the P of a goroutine unscheduled for 10 ms, and then polls every 20 µs for
			// a while. Each of these threads would always cause this.
			runtime.Gosched()
		}
		due := kernel.Monotonic() + nap
		ts := unix.NsecToTimespec(int64(nap))
		_ = unix.Nanosleep(&ts, nil) // time.Sleep would include the runtime's timers
		now := kernel.Monotonic()
		late = append(late, time.Duration(now-due))
		if now > due+nap {
			times = append(times, stall{due, now})
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.late = append(s.late, late...)
	s.times = append(s.times, times...)
}

// Stop ends the measurement and returns the wake-up delays of the threads.
func (s *Stalls) Stop() (p50, p99, longest time.Duration) {
	s.stop.Store(true)
	s.wg.Wait()
	return Percentiles(s.late)
}

// Within returns the longest single stall of a CPU within a period (CLOCK_MONOTONIC, ns). It ignores stalls
// of 1 ms and less. Call it after Stop.
func (s *Stalls) Within(from, to uint64) (longest time.Duration) {
	for _, t := range s.times {
		if t.from < to && t.to > from {
			longest = max(longest, time.Duration(min(t.to, to)-max(t.from, from)))
		}
	}
	return longest
}

// WithStalls measures the scheduling delays while f runs, and sets stall_ms_p50, _p99 and _max.
func (r *Result) WithStalls(f func() error) error {
	s := WatchStalls()
	err := f()
	p50, p99, longest := s.Stop()
	if err != nil {
		return err
	}
	for metric, d := range map[string]time.Duration{"stall_ms_p50": p50, "stall_ms_p99": p99, "stall_ms_max": longest} {
		r.Set(metric, float64(d.Microseconds())/1000)
	}
	return nil
}

// Percentiles sorts the durations and returns their median, 99th percentile and maximum; zeros for none.
func Percentiles(d []time.Duration) (p50, p99, longest time.Duration) {
	if len(d) == 0 {
		return 0, 0, 0
	}
	slices.Sort(d)
	return d[len(d)/2], d[len(d)*99/100], d[len(d)-1]
}

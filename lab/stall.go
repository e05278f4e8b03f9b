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

// Stalls measures how long the machine itself keeps threads waiting: one thread per CPU, bound to it, sleeps
// a millisecond at a time and notes by how much it woke too late. A latency that an experiment measures is
// read against it, so that a busy machine is not charged to the product.
type Stalls struct {
	stop  atomic.Bool
	wg    sync.WaitGroup
	mu    sync.Mutex
	late  []time.Duration
	times []stall
}

// stall is a time in which a CPU did not run a thread that was due: CLOCK_MONOTONIC, ns.
type stall struct{ from, to uint64 }

// WatchStalls begins to measure.
func WatchStalls() *Stalls { return watchStalls(false) }

// WatchHost begins to measure with threads that come before all others (SCHED_FIFO, where it is allowed): what keeps
// them waiting keeps the kernel's own timers waiting, too. It is the host that stands still, or interrupts.
func WatchHost() *Stalls { return watchStalls(true) }

func watchStalls(first bool) *Stalls {
	s := &Stalls{}
	for cpu := range runtime.NumCPU() {
		s.wg.Go(func() { s.watch(cpu, first) })
	}
	return s
}

func (s *Stalls) watch(cpu int, first bool) {
	runtime.LockOSThread() // never unlocked: the thread is bound to a CPU and must not serve others after
	var set unix.CPUSet
	set.Set(cpu)
	_ = unix.SchedSetaffinity(0, &set) // refused in some containers: then it measures whatever CPU it gets
	if first {
		_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 99}, 0)
	}
	const nap = uint64(time.Millisecond)
	var late []time.Duration
	var times []stall
	for i := 1; !s.stop.Load(); i++ {
		if i%8 == 0 {
			// A goroutine that is not scheduled for 10 ms has its P taken by Go's monitor, which then looks every 20 us for a while:
			// with each of these threads, always.
			runtime.Gosched()
		}
		due := kernel.Monotonic() + nap
		ts := unix.NsecToTimespec(int64(nap))
		_ = unix.Nanosleep(&ts, nil) // not time.Sleep: the runtime's timers would be measured too
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

// Stop ends the measurement and returns how late the threads woke.
func (s *Stalls) Stop() (p50, p99, longest time.Duration) {
	s.stop.Store(true)
	s.wg.Wait()
	return Percentiles(s.late)
}

// Within is for how long of a period (CLOCK_MONOTONIC, ns) one CPU stood still at most, at a stretch: stalls of a millisecond
// and less are left out. Ask after Stop.
func (s *Stalls) Within(from, to uint64) (longest time.Duration) {
	for _, t := range s.times {
		if t.from < to && t.to > from {
			longest = max(longest, time.Duration(min(t.to, to)-max(t.from, from)))
		}
	}
	return longest
}

// WithStalls measures how long the machine keeps threads waiting while f runs, and sets stall_ms_p50, _p99 and _max.
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

// Percentiles sorts the durations and returns their median, their 99th percentile and the longest; zeros
// for none.
func Percentiles(d []time.Duration) (p50, p99, longest time.Duration) {
	if len(d) == 0 {
		return 0, 0, 0
	}
	slices.Sort(d)
	return d[len(d)/2], d[len(d)*99/100], d[len(d)-1]
}

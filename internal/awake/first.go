// SPDX-License-Identifier: Apache-2.0

package awake

import (
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A nice value says how much of a CPU a thread gets, and little of when: who wakes on a CPU where another of these processes runs
// waits for that, while the other CPU runs what could wait. The kernel finds a thread of a real-time class the CPU that runs the least
// important, at once. So a process that is [Ahead] has that class (SCHED_RR, the least priority) in the moments for which it is kept
// awake, and only as long as it does little: at each look it must have used less than half a CPU since the one before. What spins, or
// empties a server of ten thousand sessions, is at its nice value a moment later.
const (
	muchCPU  = 0.5         // of a CPU, of all its threads together
	shortest = Moment / 2  // over which that is a mean: a move takes a millisecond
	rest     = time.Second // at the nice value, after that
)

// first is whether, and since when, this process is of that class.
type first struct {
	sync.Mutex
	may   bool // as of Ahead: nobody has said otherwise
	is    bool
	not   time.Time     // not before then
	at    time.Time     // of the latest look
	spent time.Duration // CPU time until then
}

var lead first

// begin has the process be first, unless it has done much a moment ago. It may be so already.
func (f *first) begin(now time.Time) {
	f.Lock()
	defer f.Unlock()
	if !f.may || f.is || now.Before(f.not) {
		return
	}
	f.is, f.at, f.spent = true, now, cpuTime()
	_ = roundRobin.set(0) // this thread: it has something to do now
	go f.all()
}

// look ends it where the process does much, and begins again after a rest.
func (f *first) look(now time.Time) {
	f.Lock()
	spent, was, since := cpuTime(), f.is, now.Sub(f.at)
	if was && since >= shortest && float64(spent-f.spent) > muchCPU*float64(since) {
		f.is, f.not = false, now.Add(rest)
	}
	if since >= shortest {
		f.at, f.spent = now, spent
	}
	f.Unlock()
	if was {
		go f.all() // threads that have come since are of no class of ours: see roundRobin
	} else {
		f.begin(now)
	}
}

// end ends it.
func (f *first) end() {
	f.Lock()
	defer f.Unlock()
	if f.is {
		f.is = false
		go f.all()
	}
}

// all gives each thread the class that it is to have.
func (f *first) all() {
	f.Lock()
	defer f.Unlock()
	class := &fair
	if f.is {
		class = &roundRobin
	}
	threads, _ := os.ReadDir("/proc/self/task")
	for _, t := range threads {
		if id, err := strconv.Atoi(t.Name()); err == nil {
			_ = class.set(id) // it may have ended
		}
	}
}

// class is a scheduling class (sched(7)).
type class unix.SchedAttr

var (
	// What a thread starts, processes above all, does not inherit it.
	roundRobin = class{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK}
	fair       = class{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL, Nice: ahead}
)

// set has a thread of this process be of the class; 0: the calling one.
func (c *class) set(thread int) error { return unix.SchedSetAttr(thread, (*unix.SchedAttr)(c), 0) }

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// SPDX-License-Identifier: Apache-2.0

package awake

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Go's monitor thread (sysmon, runtime/proc.go) sleeps whenever all of a process does, and is woken by the first thing that the
// process does then: a wake-up more for each message, on the CPU that the message's receiver needs next, and some naps of 20 us
// until it sleeps again. It does not sleep while a goroutine is in a call of the kernel that keeps its P. So here one is, for as
// long as there is much to do: it naps for less than the 10 ms after which its P would be taken from it, and the monitor then
// wakes a hundred times a second, and not with each message.
const (
	nap     = 8 * time.Millisecond
	often   = 500 // messages in a second: from there on naps are the lesser evil
	looks   = 12  // naps after which it is asked whether there is still much to do
	counted = 16  // messages over which it is asked whether there is now
	rooms   = 1   // Ps more: with each that idles more threads look for something to do
)

var monitor struct {
	once  sync.Once
	room  atomic.Bool   // for the goroutine: a P that nobody else misses
	beats atomic.Uint64 // messages since the process began
	at    atomic.Int64  // when they were last counted: ns since began
	until atomic.Int64  // for so long it is kept awake, whatever there is to do
	held  atomic.Bool
}

var began = time.Now()

// Room makes room for what [Busy] and [For] do about Go's monitor, which without it is nothing: GOMAXPROCS is larger from then
// on, and does not follow the machine any more. Each call of the kernel that waits keeps a P, and where none is idle the monitor
// takes them back, and looks every 20 us for some milliseconds after. Call it where a process has begun that does little else, never for an application.
func Room() {
	monitor.once.Do(func() {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + rooms)
		monitor.room.Store(true)
	})
}

// Busy says that a message has come. Where many come (500 a second and more), each wakes the process once from here on and not
// twice: of 1,200 wake-ups for 400 messages 770 are left (TestBusy). It takes some nanoseconds.
func Busy() {
	n := monitor.beats.Add(1)
	if n%counted != 0 || monitor.held.Load() {
		return
	}
	now := int64(time.Since(began))
	if before := monitor.at.Swap(now); now-before < int64(counted*time.Second/often) {
		hold()
	}
}

// holdFor keeps the monitor awake for d from now on at least.
func holdFor(d time.Duration) {
	until := int64(time.Since(began) + d)
	for {
		was := monitor.until.Load()
		if was >= until || monitor.until.CompareAndSwap(was, until) {
			break
		}
	}
	hold()
}

func hold() {
	if !monitor.room.Load() || !monitor.held.CompareAndSwap(false, true) {
		return
	}
	go func() {
		ts := unix.NsecToTimespec(int64(nap))
		for much := true; much; {
			n := monitor.beats.Load()
			for range looks {
				_ = unix.Nanosleep(&ts, nil) // not time.Sleep, which gives the P away
				runtime.Gosched()            // the monitor looks for goroutines that run for long, and would take this for one
			}
			much = monitor.beats.Load()-n >= uint64(looks*nap*often/time.Second) || int64(time.Since(began)) < monitor.until.Load()
		}
		monitor.held.Store(false)
	}()
}

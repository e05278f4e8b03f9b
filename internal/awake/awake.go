// SPDX-License-Identifier: Apache-2.0

// Package awake keeps a machine's CPUs from sleeping for moments in which every wake-up counts. One that sleeps takes its time to
// wake: tens of microseconds in a virtual machine, whose host has to let it run again, a hundred and more in deep sleep of a real
// one. A session that moves waits for a dozen wake-ups of processes that have nothing else to do. And it keeps Go's runtime from
// sleeping in a way that has each message wake two threads: see [Busy]. [Ahead] has a process that is awake get a CPU.
package awake

import (
	"encoding/binary"
	"os"
	"sync"
	"time"
)

// device takes how long a CPU may take to wake up, in us, for as long as it is open (Documentation/power/pm_qos_interface.rst).
// Of several wishes the kernel grants the shortest, so that ours takes nothing from others.
const device = "/dev/cpu_dma_latency"

// Moment is for what takes some milliseconds and may come again soon: to begin and to end it wakes every CPU.
const Moment = 100 * time.Millisecond

var wish struct {
	sync.Mutex
	until time.Time
	is    bool
	open  *os.File // nil: there is no such device, or it is not ours to open
}

// For keeps the CPUs, and Go's monitor, awake for d from now on, or for as long as it was asked for before, and has a process that is
// [Ahead] be first. Nothing is promised: where the device is missing, or is not ours to open, they sleep as they do. Call it as often as
// you like, a second time costs next to nothing.
func For(d time.Duration) {
	holdFor(d)
	wish.Lock()
	defer wish.Unlock()
	now := time.Now()
	if until := now.Add(d); until.After(wish.until) {
		wish.until = until
	}
	if wish.is {
		return
	}
	wish.is = true
	lead.begin(now)
	wish.open = noLatency()
	time.AfterFunc(min(d, Moment), end)
}

// noLatency has no CPU take long to wake up, until what it returns is closed.
func noLatency() *os.File {
	f, err := os.OpenFile(device, os.O_WRONLY, 0)
	if err != nil {
		return nil
	}
	if _, err := f.Write(binary.NativeEndian.AppendUint32(nil, 0)); err != nil {
		f.Close()
		return nil
	}
	return f
}

// end lets the CPUs sleep, when nobody has asked for more.
func end() {
	wish.Lock()
	defer wish.Unlock()
	now := time.Now()
	if left := wish.until.Sub(now); left > 0 {
		lead.look(now)
		time.AfterFunc(min(left, Moment), end)
		return
	}
	lead.end()
	if wish.open != nil {
		wish.open.Close()
	}
	wish.is, wish.open = false, nil
}

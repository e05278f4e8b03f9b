// SPDX-License-Identifier: Apache-2.0

// Package awake keeps a machine's CPUs out of idle states for moments in which every wake-up counts. A CPU takes time to leave
// one: tens of microseconds in a virtual machine, whose host has to run it again, 100 us and more in deep states of a real one. A move of a
// session waits for a dozen wake-ups of otherwise idle processes. The scheduling of such processes is left to their units (Nice=).
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

// For keeps the CPUs awake for d from now on, or for longer if an earlier call asks for that. Nothing is promised: where the device is
// missing, or this process may not open it, CPUs sleep as usual. A second call costs some nanoseconds.
func For(d time.Duration) {
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
		time.AfterFunc(min(left, Moment), end)
		return
	}
	if wish.open != nil {
		wish.open.Close()
	}
	wish.is, wish.open = false, nil
}

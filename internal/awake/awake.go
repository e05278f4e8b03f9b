// SPDX-License-Identifier: Apache-2.0

// Package awake keeps a machine's CPUs out of idle states while every wake-up counts. A CPU takes
// time to leave one. In a virtual machine it takes tens of microseconds, because the host has to
// schedule it. In deep states of a real machine it takes 100 us and more. A move of a session waits
// for a dozen wake-ups of otherwise idle processes. Their units set the scheduling of such
// processes (Nice=).
package awake

import (
	"encoding/binary"
	"os"
	"sync"
	"time"
)

// device accepts the maximum wake-up latency of CPUs in us, in force while it is open
// (Documentation/power/pm_qos_interface.rst). The kernel applies the lowest of all requests, so
// ours does not affect others.
const device = "/dev/cpu_dma_latency"

// Moment is for operations of some milliseconds that may repeat soon, because each start and end
// wakes every CPU.
const Moment = 100 * time.Millisecond

var wish struct {
	sync.Mutex
	until time.Time
	is    bool
	open  *os.File // nil: no such device, or no access to it
}

// For keeps the CPUs awake for d from now on, or longer by an earlier call. It is best effort:
// without the device, or without access to it, CPUs sleep as usual. A second call costs some
// nanoseconds.
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

// noLatency requests the lowest latency until its result is closed.
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

// end releases the CPUs, unless a later call extended the time.
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

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"time"

	"golang.org/x/sys/unix"
)

// Monotonic returns CLOCK_MONOTONIC in ns, the clock of bpf_ktime_get_ns in BPF programs.
func Monotonic() uint64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0 // cannot fail for this clock
	}
	return uint64(t.Nano())
}

// WallTime converts a CLOCK_MONOTONIC reading in ns to a time, truncated to 1 ms. It returns the zero time for 0.
func WallTime(monotonic uint64) time.Time {
	if monotonic == 0 {
		return time.Time{}
	}
	return time.Now().Add(-time.Duration(Monotonic() - monotonic)).Truncate(time.Millisecond)
}

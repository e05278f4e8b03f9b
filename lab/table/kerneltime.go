// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// kernelTime sums the CPU time of the kernel's own threads. The kernel frees a map in a worker after the
// last reference is closed, and does not charge the closing process. Other processes may keep a shared
// machine busy and are excluded.
type kernelTime struct {
	at    map[string]time.Duration // of each kernel thread, by its directory in /proc, at the last update
	spent time.Duration            // since the beginning
}

func newKernelTime() (*kernelTime, error) {
	m := &kernelTime{at: map[string]time.Duration{}}
	if err := m.update(); err != nil {
		return nil, err
	}
	if len(m.at) == 0 {
		return nil, errors.New("no kernel thread has a schedstat in /proc")
	}
	m.spent = 0 // discards earlier use
	return m, nil
}

// update adds the threads' CPU time since the last call. The last part of an ended worker's time is lost.
func (m *kernelTime) update() error {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		had, known := m.at[dir]
		if !known && !ofKernel(dir) {
			continue
		}
		ran, err := ranFor(dir)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || ran < had {
			delete(m.at, dir) // it ended; another process may have its number now
			continue
		}
		if err != nil {
			return err
		}
		m.spent += ran - had
		m.at[dir] = ran
	}
	return nil
}

// ofKernel reports by PF_KTHREAD whether a process is a thread of the kernel.
func ofKernel(dir string) bool {
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return false
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // the preceding name may hold any character
	const flags, kernelThread = 6, 0x00200000
	if len(f) <= flags {
		return false
	}
	n, err := strconv.ParseUint(f[flags], 10, 64)
	return err == nil && n&kernelThread != 0
}

// ranFor returns the CPU time of a thread, from the scheduler in nanoseconds.
func ranFor(dir string) (time.Duration, error) {
	text, err := os.ReadFile(filepath.Join(dir, "schedstat"))
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(text), " ")
	ns, err := strconv.ParseInt(first, 10, 64)
	return time.Duration(ns), err
}

// Detection of the end of the kernel's work. It needs at least atLeast samples, several RCU grace periods.
// It ends after calm samples in a row with hardly more than the idle use, or at limit.
const (
	sample  = 100 * time.Millisecond
	atLeast = 8
	calm    = 4
	limit   = 40
)

// cost adds the milliseconds of CPU time of f and of the kernel work caused by it. It counts the calling
// thread, and the kernel's threads until they are as idle as before. The idle use of the same duration is
// subtracted.
func (m *kernelTime) cost(ctx context.Context, ms *float64, f func() error) error {
	runtime.GC() // no other memory may be returned to the kernel meanwhile
	if err := m.update(); err != nil {
		return err
	}
	idle, err := m.next(ctx, atLeast)
	if err != nil {
		return err
	}
	idle /= atLeast // of one sample
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin, before := time.Now(), threadTime()
	if err := f(); err != nil {
		return err
	}
	total, still := threadTime()-before, 0
	for i := 0; i < limit && (i < atLeast || still < calm); i++ {
		used, err := m.next(ctx, 1)
		if err != nil {
			return err
		}
		total += used
		still++
		if used > 2*idle+2*time.Millisecond {
			still = 0
		}
	}
	total -= time.Duration(float64(idle) * float64(time.Since(begin)) / float64(sample))
	*ms += float64(total.Microseconds()) / 1000
	return nil
}

// next waits for so many samples and returns the kernel threads' CPU time since the last update.
func (m *kernelTime) next(ctx context.Context, samples int) (time.Duration, error) {
	before := m.spent
	select {
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-time.After(time.Duration(samples) * sample):
	}
	err := m.update()
	return m.spent - before, err
}

// threadTime returns the CPU time of the calling thread.
func threadTime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) // every kernel has this clock
	return time.Duration(ts.Nano())
}

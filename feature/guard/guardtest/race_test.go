// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/guard"
)

// onCPUs runs f on each of the first n CPUs available to this process, concurrently.
func onCPUs(t *testing.T, n int, f func()) {
	t.Helper()
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for cpu := 0; n > 0 && cpu < 1024; cpu++ {
		if !allowed.IsSet(cpu) {
			continue
		}
		n--
		wg.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread ends with its affinity
			var one unix.CPUSet
			one.Set(cpu)
			if err := unix.SchedSetaffinity(0, &one); err != nil {
				t.Error(err)
				return
			}
			f()
		})
	}
	wg.Wait()
}

// TestTwoCPUsCountAlike sends packets of one source from two CPUs, at one instant of a stopped
// clock. The total records all packets. The source's word records all but a bounded share.
func TestTwoCPUsCountAlike(t *testing.T) {
	need(t)
	if runtime.NumCPU() < 2 {
		t.Skip("need: kernel with two CPUs")
	}
	const each = 1900 // a source's count holds 4,095
	g := newGuard(t, Options{Limit: uint64(guard.MaxLimit), Seed: 3})
	if _, err := g.Passes(1<<40, g.frame); err != nil { // sets the clock
		t.Fatal(err)
	}
	onCPUs(t, 2, func() {
		if _, _, err := g.Program().Benchmark(g.frame, each, nil); err != nil {
			t.Error(err)
		}
	})
	sent := 2*each + 1
	c := g.Counts(1 << 40)
	if c.Passed+c.Refused != uint64(sent) {
		t.Errorf("counted %d packets of %d", c.Passed+c.Refused, sent)
	}
	if recorded := g.Spent(1 << 40); recorded != int(c.Passed) {
		t.Errorf("%d packets passed, but the total counted %d", c.Passed, recorded)
	}
	if counted := g.Counted(); counted < sent*98/100 || counted > sent {
		t.Errorf("the source's word counted %d packets of %d", counted, sent)
	}
}

// TestTwoCPUsKeepTheLimit floods from two CPUs in real time.
func TestTwoCPUsKeepTheLimit(t *testing.T) {
	need(t)
	const limit = 20_000
	g := newGuard(t, Options{Limit: limit, RealClock: true})
	start := time.Now()
	onCPUs(t, 2, func() {
		for time.Since(start) < 500*time.Millisecond {
			if _, _, err := g.Program().Benchmark(g.frame, 5000, nil); err != nil {
				t.Error(err)
				return
			}
		}
	})
	seconds := time.Since(start).Seconds()
	c := g.Counts(0)
	if most := uint64(limit * (seconds + 0.121)); c.Passed > most {
		t.Errorf("%d packets passed in %.3f s, want at most %d", c.Passed, seconds, most)
	}
	if c.Passed == 0 || c.Refused < c.Passed {
		t.Errorf("%d passed, %d refused: the test sent no flood", c.Passed, c.Refused)
	}
}

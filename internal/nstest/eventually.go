// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"errors"
	"flag"
	"fmt"
	"testing"
	"time"
)

// Bounds of the pause between two calls of a condition. Between them the pause is a tenth of the
// elapsed time, so a duration measured by a test is right within 10 %. A slow condition gets a
// pause as long as its call, so it uses at most half of a CPU.
const (
	minPause = time.Millisecond
	maxPause = 20 * time.Millisecond
)

// Timeout is the time limit of Eventually. It exceeds the stalls of a busy machine. It is three
// times as long with -short, because CI uses -short on emulated kernels. Only a failing test waits
// that long. A [Child] does not see -short and uses the longer time.
func Timeout() time.Duration {
	if flag.Parsed() && !testing.Short() {
		return time.Minute
	}
	return 3 * time.Minute
}

// Eventually calls cond until it returns nil. After Timeout the test fails with cond's last error,
// so the error should describe the state. cond runs on the calling goroutine and may call t.Fatal.
func Eventually(t testing.TB, cond func() error) {
	t.Helper()
	Within(t, 0, cond)
}

// Within is Eventually for conditions slower than Timeout even on an idle machine.
func Within(t testing.TB, d time.Duration, cond func() error) {
	t.Helper()
	if err := Poll(max(d, Timeout()), cond); err != nil {
		t.Fatal(err)
	}
}

// Until is Eventually for a simple condition. The failure names the awaited event.
func Until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	Eventually(t, func() error {
		if !cond() {
			return fmt.Errorf("not yet: %s", what)
		}
		return nil
	})
}

// Steadily calls cond for d and fails the test at the first error. It checks that nothing happens,
// or that a state persists.
func Steadily(t testing.TB, d time.Duration, cond func() error) {
	t.Helper()
	var broken error
	start := time.Now()
	err := Poll(d, func() error {
		if broken = cond(); broken != nil {
			return nil
		}
		return errSteady
	})
	if broken != nil {
		t.Fatalf("after %v of %v: %v", time.Since(start).Round(time.Millisecond), d, broken)
	}
	if !errors.Is(err, errSteady) {
		t.Fatal(err)
	}
}

var errSteady = errors.New("steady")

// Poll calls cond until it returns nil. After the timeout it returns the last error. cond runs at
// least once, and once more after the timeout.
func Poll(timeout time.Duration, cond func() error) error {
	start := time.Now()
	for {
		waited := time.Since(start)
		err := cond()
		if err == nil {
			return nil
		}
		if waited >= timeout {
			return fmt.Errorf("after %v: %w", waited.Round(time.Millisecond), err)
		}
		pause := max(minPause, min(waited/10, maxPause), time.Since(start)-waited)
		time.Sleep(min(pause, timeout-waited))
	}
}

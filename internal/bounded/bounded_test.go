// SPDX-License-Identifier: Apache-2.0

package bounded

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestDo checks that a stuck call times out after a second. Other calls of its party then fail at
// once, but calls of other parties run.
func TestDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release, results := make(chan struct{}), make(chan int, 1)
		stuck := func() (int, error) { <-release; return 7, nil }
		for i, want := range []time.Duration{limit, 0, 0} {
			began := time.Now()
			if _, err := Do("a", stuck, func(n int, _ error) { results <- n }); !errors.Is(err, ErrStuck) || time.Since(began) != want {
				t.Errorf("call %d: %v after %s, want %s", i, err, time.Since(began), want)
			}
		}
		if err := Run("b", func() error { return nil }); err != nil {
			t.Error("another party:", err)
		}
		close(release)
		if n := <-results; n != 7 {
			t.Errorf("the late result is %d", n)
		}
		time.Sleep(rest)
		if n, err := Do("a", stuck, nil); n != 7 || err != nil {
			t.Errorf("once it answers: %d, %v", n, err)
		}
		if len(parties) != 0 || total != 0 {
			t.Errorf("%d parties, %d calls are left", len(parties), total)
		}
	})
}

// TestStuckCallsAreBounded checks that a party occupies few threads under any number of calls.
func TestStuckCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		defer close(release)
		var calls atomic.Int32
		for range 20 {
			_ = Run("a", func() error { calls.Add(1); <-release; return nil }) // checked through calls
			time.Sleep(rest)
		}
		if n := calls.Load(); n != maxStuck {
			t.Errorf("%d calls wait, want %d", n, maxStuck)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"testing"
	"time"
)

// However many processes of a user wait for a slot, and however long a look at each takes, they cost a fifth of a CPU.
func TestWaitersPause(t *testing.T) {
	var w waiters
	for n := 1; n <= 16; n++ {
		defer w.enter(7)()
		for _, took := range []time.Duration{time.Millisecond, 10 * time.Millisecond, 30 * time.Millisecond} {
			pause := w.pause(7, took)
			if share := float64(n) * took.Seconds() / (took + pause).Seconds(); share > 0.25 {
				t.Errorf("%d that take %v each: %v of a CPU", n, took, share)
			}
			if pause > 2*time.Second {
				t.Errorf("%d that take %v each wait for %v", n, took, pause)
			}
		}
	}
	defer w.enter(8)()
	if p := w.pause(8, time.Millisecond); p != 20*time.Millisecond {
		t.Errorf("another user's waits for %v", p)
	}
	if p := w.pause(0, 100*time.Millisecond); p != 400*time.Millisecond {
		t.Errorf("root's waits for %v", p)
	}
	leave := w.enter(9)
	if leave(); len(w.users) != 2 {
		t.Errorf("%d users are remembered", len(w.users))
	}
}

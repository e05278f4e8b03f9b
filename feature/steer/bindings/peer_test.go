// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weir-project/weir/service"
)

// TestLooksShareFifth: the searches for a user's waiting processes cost a fifth of a CPU. The number of processes and
// the duration of a search do not matter.
func TestLooksShareFifth(t *testing.T) {
	for took, more := range map[time.Duration]time.Duration{time.Millisecond: 0, 30 * time.Millisecond: 0, 2 * time.Second: 0, 10 * time.Millisecond: 2} {
		synctest.Test(t, func(t *testing.T) {
			var w turns
			const lasts = 2 * time.Minute
			ctx, cancel := context.WithTimeout(t.Context(), lasts)
			defer cancel()
			spent := time.Duration(0) // by one goroutine at a time
			var all sync.WaitGroup
			for range 16 {
				all.Go(func() {
					for {
						done, err := w.claim(ctx, 7)
						if err != nil {
							return
						}
						time.Sleep(took)
						spent += (1 + more) * took // outside of the turn it takes no time here
						done(int(more))
					}
				})
			}
			if done, err := w.claim(ctx, 8); err != nil {
				t.Error("another user waits:", err)
			} else {
				done(0)
			}
			all.Wait()
			if share := spent.Seconds() / lasts.Seconds(); share > 0.22 || share < 0.18 {
				t.Errorf("16 that take %v each: %.2f of a CPU", took, share)
			}
			time.Sleep(time.Minute)
			w.enter(9)
			if len(w.users) != 1 {
				t.Errorf("%d users are remembered", len(w.users))
			}
		})
	}
}

// TestLooksOfRoot: root's processes do not wait for each other.
func TestLooksOfRoot(t *testing.T) {
	var w turns
	for range 2 {
		if _, err := w.claim(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTurnDoesNotCome: a process without a turn in time gets the error of its last search.
func TestTurnDoesNotCome(t *testing.T) {
	var w turns
	if _, err := w.claim(t.Context(), 7); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := w.claim(ctx, 7); !errors.Is(err, service.ErrNotReady) {
		t.Errorf("%v, want an error that waiting may help", err)
	}
	for _, err := range []error{errTurn, service.ErrNoSocket} {
		if d := pauseAfter(err, nil, time.Second, 7); d != between {
			t.Errorf("after %v: %v", err, d)
		}
	}
	if d := pauseAfter(service.ErrNotReady, &service.Ready{Interval: time.Second}, 0, 7); d != time.Second {
		t.Errorf("after a failed check: %v", d)
	}
	if d := pauseAfter(service.ErrNoSocket, nil, 100*time.Millisecond, 0); d != 400*time.Millisecond {
		t.Errorf("root: %v", d)
	}
}

// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// However many processes of a user wait for a slot, and however long a look at each takes, the first included, they cost a fifth of a CPU.
func TestLooksShareFifth(t *testing.T) {
	for _, took := range []time.Duration{time.Millisecond, 30 * time.Millisecond, 2 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			var w turns
			const lasts = 2 * time.Minute
			ctx, cancel := context.WithTimeout(t.Context(), lasts)
			defer cancel()
			spent := time.Duration(0) // by one at a time
			var all sync.WaitGroup
			for range 16 {
				all.Go(func() {
					for {
						done, err := w.claim(ctx, 7)
						if err != nil {
							return
						}
						time.Sleep(took)
						spent += took
						done()
					}
				})
			}
			if done, err := w.claim(ctx, 8); err != nil {
				t.Error("another user waits:", err)
			} else {
				done()
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

// Root's processes do not wait for each other.
func TestLooksOfRoot(t *testing.T) {
	var w turns
	for range 2 {
		if _, err := w.claim(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
}

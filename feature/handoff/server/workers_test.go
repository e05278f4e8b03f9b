// SPDX-License-Identifier: Apache-2.0

package server

import (
	"runtime"
	"sync"
	"testing"
	"time"
)

// What blocks does not keep what comes after it waiting, and few of those who have worked stay.
func TestWorkers(t *testing.T) {
	before := runtime.NumGoroutine()
	done := make(chan struct{})
	w := newWorkers(done)
	for range 3 {
		const jobs = 10 * mostWaiting
		var all, begun sync.WaitGroup
		block := make(chan struct{})
		begun.Add(jobs)
		for range jobs {
			all.Add(1)
			w.run(func() {
				defer all.Done()
				begun.Done()
				<-block
			})
		}
		begun.Wait() // each beside the others
		close(block)
		all.Wait()
		goroutines(t, before+mostWaiting)
	}
	close(done)
	goroutines(t, before)
}

// goroutines waits until there are as few.
func goroutines(t *testing.T, most int) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); runtime.NumGoroutine() > most; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines, and at most %d should be left", runtime.NumGoroutine(), most)
		}
	}
}

// A worker that waits is taken in place of a new one.
func BenchmarkWorkers(b *testing.B) {
	w := newWorkers(b.Context().Done())
	var grow func(n int) int
	grow = func(n int) int { // a stack of some 30 KiB
		var a [64]int
		if n == 0 {
			return a[n]
		}
		return grow(n-1) + a[n%64]
	}
	for _, how := range []string{"workers", "go"} {
		b.Run(how, func(b *testing.B) {
			did := make(chan int)
			for b.Loop() {
				f := func() { did <- grow(50) }
				if how == "go" {
					go f()
				} else {
					w.run(f)
				}
				<-did
			}
		})
	}
}

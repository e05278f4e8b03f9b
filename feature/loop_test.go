// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func ExampleLoop_Turns() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var reported Reported[string]
	for turn := range (Loop{Every: time.Millisecond}).Turns(ctx) {
		problem := []string{"no link", "no link", "", "no link"}[turn.N]
		if reported.Changed("eth0", problem) && problem != "" {
			fmt.Println("turn", turn.N, problem)
		}
		if turn.N == 3 {
			cancel()
		}
	}
	// Output:
	// turn 0 no link
	// turn 3 no link
}

// A loop has a turn at its start, at each interval and at each wakeup. Of the turns missed while the caller works, one
// remains.
func TestTurns(t *testing.T) {
	for _, c := range []struct {
		name  string
		later bool
		works map[int]time.Duration // the caller's time in a turn
		wake  []time.Duration
		want  []time.Duration // turns of the first 5 s
	}{
		{name: "at once", want: []time.Duration{0, 1000, 2000, 3000, 4000}},
		{name: "later", later: true, want: []time.Duration{1000, 2000, 3000, 4000}},
		{name: "by the clock, not after the work", works: map[int]time.Duration{0: 900, 1: 300}, want: []time.Duration{0, 1000, 2000, 3000, 4000}},
		{name: "slow", works: map[int]time.Duration{1: 2500}, want: []time.Duration{0, 1000, 3500, 4000}},
		{name: "woken", wake: []time.Duration{300, 2400}, want: []time.Duration{0, 300, 1000, 2000, 2400, 3000, 4000}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 4500*time.Millisecond)
				defer cancel()
				begin := time.Now()
				wake := make(chan struct{}, 1)
				for _, at := range c.wake {
					time.AfterFunc(at*time.Millisecond, func() { wake <- struct{}{} })
				}
				var got []time.Duration
				for turn := range (Loop{Every: time.Second, Later: c.later, Wake: wake}).Turns(ctx) {
					if turn.N != len(got) || turn.Changed {
						t.Errorf("turn %+v, want number %d without a change", turn, len(got))
					}
					got = append(got, time.Since(begin)/time.Millisecond)
					time.Sleep(c.works[turn.N] * time.Millisecond)
				}
				if !slices.Equal(got, c.want) {
					t.Errorf("turns at %v ms, want %v", got, c.want)
				}
				if passed := time.Since(begin); passed != 4500*time.Millisecond {
					t.Errorf("the loop ended after %v, not with its context", passed)
				}
			})
		})
	}
}

// The end of the context ends a loop even while its caller works, without a further turn.
func TestTurnsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		wake := make(chan struct{}, 1)
		n := 0
		for range (Loop{Every: time.Second, Wake: wake}).Turns(ctx) {
			n++
			wake <- struct{}{}
			time.Sleep(2 * time.Second) // all sources of turns are due
			cancel()
		}
		if n != 1 {
			t.Errorf("%d turns, want 1", n)
		}
	})
}

// rootWithLock returns a pin root for one test, with an instance and a lock. An empty root would go with its lock.
func rootWithLock(t *testing.T) *kernel.Root {
	t.Helper()
	nstest.NeedRoot(t)
	path := nstest.BPFFS + "/" + t.Name()
	t.Cleanup(func() { os.RemoveAll(path) })
	if err := os.MkdirAll(filepath.Join(path, "4026531840", "test", "a"), 0o755); err != nil {
		t.Fatal(err)
	}
	r := kernel.OpenRoot(path)
	change(t, r)
	return r
}

// change looks like a change of pins to watchers.
func change(t *testing.T, r *kernel.Root) {
	t.Helper()
	l, err := r.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	l.Unlock()
}

// A change of pins wakes a loop long before its next turn.
func TestTurnsByChange(t *testing.T) {
	r := rootWithLock(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	n := 0
	for turn := range (Loop{Every: time.Hour, Root: r}).Turns(ctx) {
		if turn.Changed != (turn.N > 0) {
			t.Errorf("turn %+v: only the first one is without a change", turn)
		}
		if n++; n == 3 {
			break
		}
		change(t, r)
	}
	if n != 3 {
		t.Errorf("%d turns of two changes, want 3", n)
	}
}

// With Gather, changes wait for the loop's regular turn, and are reported with it.
func TestTurnsGather(t *testing.T) {
	r := rootWithLock(t)
	const every = 50 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	begin, changes, heard := time.Now(), 0, 0
	for turn := range (Loop{Every: every, Root: r, Gather: true}).Turns(ctx) {
		if early := time.Duration(turn.N)*every - time.Since(begin); early > 0 {
			t.Errorf("turn %d came %v early", turn.N, early)
		}
		if turn.Changed {
			heard++
		}
		if heard > changes {
			t.Fatalf("turn %d tells of a change that nobody made", turn.N)
		}
		if heard == 2 {
			return
		}
		if heard == changes {
			changes++
			change(t, r)
		}
	}
	t.Errorf("%d changes heard of, want 2", heard)
}

// The same text is no change. Keys start with the empty text, and dropped keys start again.
func TestReported(t *testing.T) {
	var r Reported[int]
	for n, c := range []struct {
		key  int
		text string
		want bool
	}{{1, "", false}, {1, "a", true}, {1, "a", false}, {2, "a", true}, {1, "b", true}, {1, "", true}, {1, "", false}, {1, "b", true}, {2, "a", false}} {
		if got := r.Changed(c.key, c.text); got != c.want || r.Last(c.key) != c.text {
			t.Errorf("step %d: changed %v, want %v; last %q, want %q", n, got, c.want, r.Last(c.key), c.text)
		}
	}
	r.Keep(func(key int) bool { return key == 2 })
	if !r.Changed(1, "b") || r.Changed(2, "a") {
		t.Error("the key that was kept, and no other, is remembered")
	}
}

// One task runs for each key at a time. Start runs it again after its end, and Wait waits for all tasks.
func TestTasks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var tasks Tasks[string]
		var a, b atomic.Int32 // started
		endA, endB := make(chan struct{}), make(chan struct{})
		begun := func(wantA, wantB int32) {
			t.Helper()
			tasks.Start("a", func() { a.Add(1); <-endA })
			tasks.Start("b", func() { b.Add(1); <-endB })
			if synctest.Wait(); a.Load() != wantA || b.Load() != wantB {
				t.Fatalf("a begun %d times, b %d; want %d and %d", a.Load(), b.Load(), wantA, wantB)
			}
		}
		begun(1, 1)
		begun(1, 1)
		endA <- struct{}{}
		synctest.Wait()
		begun(2, 1)
		var waited atomic.Bool
		go func() { tasks.Wait(); waited.Store(true) }()
		endA <- struct{}{}
		if synctest.Wait(); waited.Load() {
			t.Error("Wait does not wait for b")
		}
		endB <- struct{}{}
		if synctest.Wait(); !waited.Load() {
			t.Error("Wait waits for nobody")
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"iter"
	"sync"
	"time"

	"github.com/weir-project/weir/kernel"
)

// Loop schedules a part of weir serve that compares the host with its configuration: at the start, at an interval, and
// at each wakeup. Zero fields other than Every disable their function.
type Loop struct {
	Every time.Duration
	// Later skips the turn at the start.
	Later bool
	// Root wakes the loop when weir commands change its pins. If the host has no inotify watch left, only Every detects
	// changes.
	Root *kernel.Root
	// Gather delays changes of pins to the next turn. A burst of commands then causes one turn.
	Gather bool
	// Wake wakes the loop with each value.
	Wake <-chan struct{}
}

// Turn is one turn of a loop.
type Turn struct {
	N       int  // counted from 0
	Changed bool // Root has reported a change of pins since the previous turn
}

// Turns yields one turn after another until ctx is done. If several turns of Every fall due while the caller works, one
// remains.
func (l Loop) Turns(ctx context.Context) iter.Seq[Turn] {
	return func(yield func(Turn) bool) {
		changes, changed := l.changes()
		if changes != nil {
			defer changes.Close()
		}
		wake := changed
		if l.Gather {
			wake = nil
		}
		tick := time.NewTicker(l.Every)
		defer tick.Stop()
		n := 0
		if !l.Later {
			if !yield(Turn{}) {
				return
			}
			n++
		}
		for ; ; n++ {
			t := Turn{N: n}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if changes != nil {
					_ = changes.Renew() // a missed change is found by a turn of Every
				}
			case <-l.Wake:
			case <-wake:
				t.Changed = true
			}
			select {
			case <-changed:
				t.Changed = true
			default:
			}
			if ctx.Err() != nil || !yield(t) {
				return
			}
		}
	}
}

// changes starts watching the pins. It returns nil if the host cannot.
func (l Loop) changes() (*kernel.Changes, <-chan struct{}) {
	if l.Root == nil {
		return nil, nil
	}
	c, err := l.Root.Changes()
	if err != nil {
		return nil, nil
	}
	return c, c.C
}

// Reported remembers the last reported text of each key. A loop then reports a failure once, not in every turn. The zero
// value is ready. It is not safe for concurrent use.
type Reported[K comparable] struct{ last map[K]string }

// Changed reports whether text differs from the key's last text, and stores it. The initial text of every key is empty,
// meaning no fault.
func (r *Reported[K]) Changed(key K, text string) bool {
	if r.last[key] == text {
		return false
	}
	if text == "" {
		delete(r.last, key)
		return true
	}
	if r.last == nil {
		r.last = map[K]string{}
	}
	r.last[key] = text
	return true
}

// Last returns the key's last text.
func (r *Reported[K]) Last(key K) string { return r.last[key] }

// Keep removes the keys for which keep returns false.
func (r *Reported[K]) Keep(keep func(K) bool) {
	for key := range r.last {
		if !keep(key) {
			delete(r.last, key)
		}
	}
}

// Tasks runs one goroutine for each key, such as a watcher for each network namespace. The zero value is ready.
type Tasks[K comparable] struct {
	all     sync.WaitGroup
	mu      sync.Mutex
	running map[K]bool
}

// Start runs a task unless the key's previous one is still running. A loop calls it in every turn, and so restarts ended
// tasks.
func (t *Tasks[K]) Start(key K, task func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.running[key] {
		return
	}
	if t.running == nil {
		t.running = map[K]bool{}
	}
	t.running[key] = true
	t.all.Go(func() {
		defer func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			delete(t.running, key)
		}()
		task()
	})
}

// Wait waits until no task runs. Start must not be called meanwhile.
func (t *Tasks[K]) Wait() { t.all.Wait() }

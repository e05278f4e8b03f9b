// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"iter"
	"sync"
	"time"

	"github.com/weir-project/weir/kernel"
)

// Loop is when a part of weir serve compares the host with what it should be: at its start, every so often, and when something wakes
// it. The zero value of each field but Every stands for nothing of the kind.
type Loop struct {
	Every time.Duration
	// Later leaves out the turn at the start.
	Later bool
	// Root wakes the loop when weir commands change its pins. Where the host has no inotify watch left, the loop has the turns of
	// Every alone: changes are found with them.
	Root *kernel.Root
	// Gather makes changes of pins wait for the next turn, which a burst of commands then shares.
	Gather bool
	// Wake wakes the loop with each value.
	Wake <-chan struct{}
}

// Turn is one turn of a loop.
type Turn struct {
	N       int  // from 0
	Changed bool // pins have changed since the turn before, as far as Root tells
}

// Turns yields a turn after the other until ctx is done. Turns of Every that come while the caller still works on the last one are
// left out but for one.
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
					_ = changes.Renew() // a change that is missed is found by a turn of Every
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

// changes begins to watch the pins, nil where it cannot.
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

// Reported is what a loop last reported of each key, so that it reports the same failure once and not with every turn. The zero value
// is ready. Its methods are called one at a time.
type Reported[K comparable] struct{ last map[K]string }

// Changed tells whether a text is another one than the last of its key, and remembers it. The empty text, of a key in order, is what
// every key begins with.
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

// Last is the text that was last given for a key, "" for a key in order.
func (r *Reported[K]) Last(key K) string { return r.last[key] }

// Keep forgets the keys for which keep is false.
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

// Start runs a task, unless the last one of this key still runs: a loop calls it with every turn, and so starts again what has ended.
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

// Wait waits until no task runs. Nobody calls Start meanwhile.
func (t *Tasks[K]) Wait() { t.all.Wait() }

// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"sync"
	"time"

	"github.com/weir-project/weir/feature/handoff/peer"
)

// workers are goroutines for received frames. Idle ones are reused, because their stacks have grown. A new
// goroutine's stack grows three times before a socket is restored, while the session is stopped.
type workers struct {
	next chan func()   // to an idle worker
	stay chan struct{} // slots of idle workers
	done <-chan struct{}

	mu      sync.Mutex
	turns   map[*turn]bool // frames processed by their reader; true: seen by an earlier check
	looking bool
	quiet   int // checks since the latest frame
}

// turn is a frame processed by its reader.
type turn struct{ read func() } // continues reading

// maxWaiting is the maximum of idle workers.
const maxWaiting = 16

func newWorkers(done <-chan struct{}) *workers {
	return &workers{next: make(chan func()), stay: make(chan struct{}, maxWaiting), done: done, turns: map[*turn]bool{}}
}

// run runs f concurrently to the caller.
func (w *workers) run(f func()) {
	select {
	case w.next <- f:
	default:
		go w.work(f)
	}
}

func (w *workers) work(f func()) {
	for f != nil {
		f()
		f = w.wait()
	}
}

// wait returns the next work, or nil if the worker has to end.
func (w *workers) wait() (f func()) {
	select {
	case w.stay <- struct{}{}:
	default:
		return nil
	}
	defer func() { <-w.stay }()
	select {
	case f = <-w.next:
	case <-w.done:
	}
	return f
}

// soon is the interval of checks: a frame may delay the next read by up to twice as long.
const soon = 10 * time.Millisecond

// quietPolls is the number of checks without a frame after which they pause.
const quietPolls = 10

// begin records a frame processed by its reader. It does not set a timer for each frame: the earliest timer wakes a
// thread, on the CPU needed for the frame's work.
func (w *workers) begin(read func()) *turn {
	t := &turn{read}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.turns[t], w.quiet = false, 0
	if !w.looking {
		w.looking = true
		time.AfterFunc(soon, w.check)
	}
	return t
}

// end ends a turn. It returns false if another goroutine reads now.
func (w *workers) end(t *turn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, mine := w.turns[t]
	delete(w.turns, t)
	return mine
}

// check starts another reader for frames that take long.
func (w *workers) check() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for t, before := range w.turns {
		if before {
			delete(w.turns, t)
			go t.read()
		} else {
			w.turns[t] = true
		}
	}
	w.quiet++
	if w.looking = w.quiet <= quietPolls || len(w.turns) > 0; w.looking {
		time.AfterFunc(soon, w.check)
	}
}

// hear calls do for each frame of a connection until it ends. A single frame is processed by its reader, because
// waking another goroutine's thread takes about 50 µs of a session's downtime. Large frames, and several at once, go
// to workers. If a frame takes long, another goroutine continues reading.
func (w *workers) hear(c *peer.Conn, do func(peer.Frame)) {
	ended := make(chan struct{})
	var read func()
	read = func() {
		for {
			f, err := c.Receive()
			if err != nil {
				close(ended)
				return
			}
			if len(f.Session) > maxConcurrent || c.More() {
				w.run(func() { do(f) })
				continue
			}
			t := w.begin(read)
			do(f)
			if !w.end(t) {
				return
			}
		}
	}
	read()
	<-ended
}

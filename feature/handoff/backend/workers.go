// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"sync"
	"time"

	"github.com/weir-project/weir/feature/handoff/peer"
)

// workers are goroutines that take what has come, each by itself. Those that have nothing to do stay for the next, with a stack
// that has grown: a new one's grows three times before a socket is restored, in a time in which a session stands still.
type workers struct {
	next chan func()   // to whoever waits
	stay chan struct{} // a place for each of those who may wait
	done <-chan struct{}

	mu      sync.Mutex
	turns   map[*turn]bool // frames that are dealt with where they were read; true: looked at once
	looking bool
	quiet   int // looks since a frame came
}

// turn is one of those.
type turn struct{ read func() } // goes on reading

// maxWaiting is how many goroutines wait for work.
const maxWaiting = 16

func newWorkers(done <-chan struct{}) *workers {
	return &workers{next: make(chan func()), stay: make(chan struct{}, maxWaiting), done: done, turns: map[*turn]bool{}}
}

// run has f run beside the caller.
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

// wait returns nil for whoever is not to go on.
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

// soon is for how long at least, and twice that at most, what has come may keep the next from being read.
const soon = 10 * time.Millisecond

// quietPolls is after how many looks at nothing there is none any more until a frame comes.
const quietPolls = 10

// begin says that a frame is dealt with where it was read. There is no timer for each: one that is due before all others wakes a
// thread, on the CPU that is needed for what the frame asks for.
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

// end says that it has been, and returns false if another goroutine reads now.
func (w *workers) end(t *turn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, mine := w.turns[t]
	delete(w.turns, t)
	return mine
}

// check has others go on reading where a frame takes long.
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

// hear has do deal with whatever comes by a connection, until that has ended. A frame that comes alone is dealt with where it was
// read: to wake another goroutine's thread takes some 50 us of a time in which a session stands still. Of several each is dealt
// with by itself, as is a large one, and whoever takes long leaves the reading to another.
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

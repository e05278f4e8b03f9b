// SPDX-License-Identifier: Apache-2.0

package server

import (
	"time"

	"github.com/weir-project/weir/feature/handoff/peer"
)

// workers are goroutines that take what has come, each by itself. Those that have nothing to do stay for the next, with a stack
// that has grown: a new one's grows three times before a socket is restored, in a time in which a session stands still.
type workers struct {
	next chan func()   // to whoever waits
	stay chan struct{} // a place for each of those who may wait
	done <-chan struct{}
}

// mostWaiting is how many goroutines wait for work.
const mostWaiting = 16

func newWorkers(done <-chan struct{}) *workers {
	return &workers{next: make(chan func()), stay: make(chan struct{}, mostWaiting), done: done}
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

// soon is how long what has come may keep the next from being read.
const soon = 2 * time.Millisecond

// hear has do deal with whatever comes by a connection, until that has ended. A frame that comes alone is dealt with where it was
// read: to wake another goroutine's thread takes some 50 us of a time in which a session stands still. Of several each is dealt
// with by itself, and whoever takes long leaves the reading to another.
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
			if c.More() {
				w.run(func() { do(f) })
				continue
			}
			relief := time.AfterFunc(soon, read)
			do(f)
			if !relief.Stop() {
				return // it reads now
			}
		}
	}
	read()
	<-ended
}

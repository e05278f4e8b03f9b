// SPDX-License-Identifier: Apache-2.0

package server

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

// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"errors"
	"log/slog"
	"syscall"
	"time"
)

// Backoff waits while a listener cannot accept. It logs the first failure, and the end with the
// number of failures.
type Backoff struct {
	Name string
	Log  *slog.Logger

	d     time.Duration
	n     int // failures
	since time.Time
}

// Failed waits after an error of accept(2). The wait grows from 5 ms to 1 s.
func (b *Backoff) Failed(err error) { b.failed(err, false) }

// failed is Failed, with a short wait if room was made.
func (b *Backoff) failed(err error, room bool) {
	if errors.Is(err, syscall.ECONNABORTED) || errors.Is(err, syscall.EINTR) {
		return // the client has closed
	}
	if b.since.IsZero() {
		b.since = time.Now()
		b.Log.Warn("cannot accept connections, retrying", "listener", b.Name, "err", err)
	}
	b.n++
	b.d = min(max(2*b.d, shortestPause), longestPause)
	if room {
		b.d = shortestPause
	}
	time.Sleep(b.d)
}

// Accepted ends a series of failures.
func (b *Backoff) Accepted() {
	if b.since.IsZero() {
		return
	}
	b.Log.Info("accepts connections again", "listener", b.Name, "failures", b.n, "after", time.Since(b.since).Round(time.Millisecond))
	b.d, b.n, b.since = 0, 0, time.Time{}
}

// SPDX-License-Identifier: Apache-2.0

// Package ringbuf reads the events of programs from a BPF ring buffer, each as a Go value.
//
// A program drops an event if the buffer has no room, and the reader does not learn of it. So events are hints: a reader also compares
// the state behind them from time to time.
package ringbuf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
)

// Errors of Events.
var (
	ErrIdle  = errors.New("no event") // for as long as Reader.Idle
	ErrShort = errors.New("event is too short")
)

// Reader reads events of type T, the Go struct of the program's struct as bpf2go generates it. Close may be called while Events runs.
// Two readers of one map, also in two processes, take events from each other.
type Reader[T any] struct {
	// Idle is the time without an event after which Events yields ErrIdle; 0 is no limit. Set it before Events.
	Idle time.Duration

	ring *ringbuf.Reader
}

// Open opens a ring buffer for reading, from its oldest unread event on. The caller may close m at once, and closes the reader.
func Open[T any](m *ebpf.Map) (*Reader[T], error) {
	r, err := ringbuf.NewReader(m)
	if err != nil {
		return nil, fmt.Errorf("opening a ring buffer: %w", err)
	}
	return &Reader[T]{ring: r}, nil
}

// Events yields events in their order until Close. The end of ctx closes the reader. An error concerns one event, or one wait for an
// event: the loop may go on, or leave and call Events again later.
func (r *Reader[T]) Events(ctx context.Context) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		defer context.AfterFunc(ctx, func() { r.Close() })()
		for {
			e, err := r.next()
			if errors.Is(err, ringbuf.ErrClosed) || !yield(e, err) {
				return
			}
		}
	}
}

// next waits for an event.
func (r *Reader[T]) next() (e T, err error) {
	if r.Idle > 0 {
		r.ring.SetDeadline(time.Now().Add(r.Idle))
	}
	rec, err := r.ring.Read()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return e, ErrIdle
	} else if err != nil {
		return e, fmt.Errorf("reading an event: %w", err)
	}
	// A record may be longer than T: a later version of a program may add fields at the end.
	if _, err := binary.Decode(rec.RawSample, binary.NativeEndian, &e); err != nil {
		return e, fmt.Errorf("%w: %d bytes, want %d of %T", ErrShort, len(rec.RawSample), binary.Size(e), e)
	}
	return e, nil
}

// Close ends Events. Further calls do nothing.
func (r *Reader[T]) Close() error { return r.ring.Close() }

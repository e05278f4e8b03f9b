// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/ringbuf"
)

// Event is a change of a judgement.
type Event struct {
	Time    uint64 // CLOCK_MONOTONIC, ns
	ID      uint32 // of the session
	Ifindex int
	ByPeer  bool // judged by the peer's probes; else by answers to our probes
	Phase   Phase
	Ended   bool // the peer ended the session; Phase Down: found before the end
}

// At returns the wall-clock time of the event.
func (e Event) At() time.Time { return kernel.WallTime(e.Time) }

// SessionEvent is an event of a configured session.
type SessionEvent struct {
	Event
	Netns   string
	Session Session
}

// eventRaw is struct liveness_event.
type eventRaw struct {
	Time               uint64
	Session, ID, Index uint32
	Role, Phase, Ended uint8
	_                  uint8
}

// pollInterval is the time between checks for a new map.
const pollInterval = time.Second

// Events calls yield with every change of a judgement in a namespace, given by its inode number. It ends when ctx is
// done or yield returns false. The kernel buffers some 1,600 events for late readers. Each event goes to one process
// only.
func Events(ctx context.Context, r *kernel.Root, inode uint64, yield func(Event) bool) error {
	more := true
	for more && ctx.Err() == nil {
		err := readEvents(ctx, r, fmt.Sprint(inode), func(e Event) bool {
			more = yield(e)
			return more
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// AllEvents calls yield with every change of a judgement on the host until ctx is done. Calls are serialized. It
// finds namespaces with new sessions within a second. It skips events of sessions not configured any more.
func AllEvents(ctx context.Context, r *kernel.Root, yield func(SessionEvent)) {
	var readers feature.Tasks[string] // by scope
	defer readers.Wait()
	var mu sync.Mutex // serializes yield
	for range (feature.Loop{Every: pollInterval}).Turns(ctx) {
		found, _ := scopes(r) // an error is retried with the next turn
		for _, scope := range found {
			readers.Start(scope, func() {
				_ = readEvents(ctx, r, scope, func(e Event) bool {
					mu.Lock()
					defer mu.Unlock()
					if s, ok := whose(r, scope, e); ok {
						yield(s)
					}
					return true
				})
			})
		}
	}
}

// whose returns the session of an event.
func whose(r *kernel.Root, scope string, e Event) (s SessionEvent, ok bool) {
	p, err := readPublished(r, scope)
	if err != nil {
		return s, false
	}
	i := slices.IndexFunc(p.Config.Sessions, func(s Session) bool { return s.ID == e.ID })
	if i < 0 {
		return s, false
	}
	return SessionEvent{Event: e, Netns: p.Netns, Session: p.Config.Sessions[i]}, true
}

// readEvents reads the events of a scope until another form of its instance is published, ctx is done or yield
// returns false.
func readEvents(ctx context.Context, r *kernel.Root, scope string, yield func(Event) bool) error {
	o, err := r.OpenMapsForWriting(instance(scope), pinEvents)
	if err != nil {
		return err
	}
	defer o.Close()
	events, err := ringbuf.Open[eventRaw](o.Maps[pinEvents])
	if err != nil {
		return err
	}
	defer events.Close()
	events.Idle = pollInterval
	for e, err := range events.Events(ctx) {
		switch {
		case errors.Is(err, ringbuf.ErrIdle):
			if o.Replaced() {
				return nil
			}
			continue
		case errors.Is(err, ringbuf.ErrShort): // another version's event
			continue
		case err != nil:
			return err
		}
		out := Event{Time: e.Time, ID: e.ID, Ifindex: int(e.Index), ByPeer: e.Role == 1, Ended: e.Ended != 0, Phase: Init}
		if int(e.Phase) < len(phases) {
			out.Phase = phases[e.Phase]
		}
		if !yield(out) {
			return nil
		}
	}
	return nil
}

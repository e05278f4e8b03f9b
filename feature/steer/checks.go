// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/service"
)

// checks are the members' checks, run beside the watcher's searches: one at a time for each slot, until it passes or
// the slot has another process or none.
type checks struct {
	wake chan<- bpf.WatchEvent
	mu   sync.Mutex
	of   map[slots.Slot]*check
	all  sync.WaitGroup
}

type check struct {
	who  slots.Process
	stop context.CancelFunc
	err  error
	runs int // completed runs
}

func newChecks(wake chan<- bpf.WatchEvent) *checks {
	return &checks{wake: wake, of: map[slots.Slot]*check{}}
}

// ask returns the result for a process. If there is none, it starts the check.
func (c *checks) ask(ctx context.Context, p *record.Service, s slots.Slot, m service.Member, who slots.Process) (known bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.of[s]
	if k != nil && k.who == who {
		return k.runs > 0, k.err
	}
	if k != nil {
		k.stop()
	}
	k = &check{who: who}
	ctx, k.stop = context.WithCancel(ctx)
	c.of[s] = k
	c.all.Go(func() { c.run(ctx, k, p, s, m) })
	return false, nil
}

// run repeats one check until it passes or is canceled.
func (c *checks) run(ctx context.Context, k *check, p *record.Service, s slots.Slot, m service.Member) {
	for ctx.Err() == nil {
		err := engine.CheckMember(p, ctx, s, m, k.who)
		if ctx.Err() != nil {
			return
		}
		now, gone := slots.FindProcess(k.who.PID)
		if gone != nil || now != k.who {
			err = fmt.Errorf("%w: process %d exited while it was checked", service.ErrNotRunning, k.who.PID)
		}
		c.mu.Lock()
		k.err = err
		k.runs++
		c.mu.Unlock()
		if err == nil {
			select {
			case c.wake <- bpf.WatchEvent{}: // the search each second notices failures early enough
			default: // a search is due already
			}
		}
		if !errors.Is(err, service.ErrNotReady) {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(m.Ready.Every()):
		}
	}
}

// end cancels and forgets the checks of slots outside wanted. A nil wanted cancels all checks and waits for them.
func (c *checks) end(wanted map[slots.Slot]bool) {
	c.mu.Lock()
	for s, k := range c.of {
		if !wanted[s] {
			k.stop()
			delete(c.of, s)
		}
	}
	c.mu.Unlock()
	if wanted == nil {
		c.all.Wait()
	}
}

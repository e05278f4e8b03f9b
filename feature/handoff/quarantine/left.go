// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/quarantine/bpf"
	"github.com/weir-project/weir/feature/handoff/repair"
)

// A load balancer that reboots, or forgets a session that was silent for long, sends its packets by the hash: maybe to a backend that
// the session has left. That backend must not answer, or the client is reset. The quarantine remembers such sessions, and the agent tells
// the load balancer where they went.

const (
	// maxLeft are remembered. The quarantine has room for as many that are on their way.
	maxLeft = 1 << 15
	// leftAfter is for how long the quarantine stays shut first: the load balancer may still send what it takes back.
	leftAfter = time.Second
)

// Leaves has the quarantine remember a session that is at another backend, in a moment.
func (g *Quarantine) Leaves(f repair.Flow, e move.Epoch, to move.Backend, failed func(error)) {
	time.AfterFunc(leftAfter, func() {
		if err := g.remember(f, e, to); err != nil {
			failed(err)
		}
	})
}

func (g *Quarantine) remember(f repair.Flow, e move.Epoch, to move.Backend) error {
	g.closing.RLock()
	defer g.closing.RUnlock()
	if g.closed {
		return nil // the next agent opens the quarantine
	}
	g.changing.Lock()
	defer g.changing.Unlock()
	var v bpf.QuarantineQuarantineEntry
	if err := g.sessions.Lookup(quarantineKey(f), &v); errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && v.Epoch != uint32(e) {
		return nil // it has come back, or is a later move's
	} else if err != nil {
		return fmt.Errorf("the quarantine for %s: %w", f, err)
	}
	v.What, v.Since, v.Ifindex, v.Returned = uint32(Left), 0, uint32(to), 0
	if err := g.sessions.Update(quarantineKey(f), &v, ebpf.UpdateExist); err != nil {
		return fmt.Errorf("the quarantine for %s: %w", f, err)
	}
	g.gone = append(g.gone, f)
	for len(g.gone) > maxLeft {
		if now, ok, err := g.Lookup(g.gone[0]); err == nil && ok && now.State == Left {
			_ = g.sessions.Delete(quarantineKey(g.gone[0])) // a new connection may have taken it away
		}
		g.gone = g.gone[1:]
	}
	return nil
}

// BackTo undoes what an arrival of an epoch did that came to nothing: a session that had left before has left still.
func (g *Quarantine) BackTo(f repair.Flow, e move.Epoch, before Entry) error {
	if before.State != Left {
		return g.Lift(f, e)
	}
	g.closing.RLock()
	defer g.closing.RUnlock()
	if g.closed {
		return nil
	}
	g.changing.Lock()
	defer g.changing.Unlock()
	if now, ok, err := g.Lookup(f); err != nil || !ok || now.Epoch != e {
		return err
	}
	v := bpf.QuarantineQuarantineEntry{What: uint32(Left), Epoch: uint32(before.Epoch), Ifindex: uint32(before.To)}
	if err := g.sessions.Update(quarantineKey(f), &v, ebpf.UpdateExist); err != nil {
		return fmt.Errorf("the quarantine for %s: %w", f, err)
	}
	return nil
}

// Strays yields sessions that have left and whose packets come here, until Close or the end of ctx.
func (g *Quarantine) Strays(ctx context.Context) iter.Seq2[repair.Flow, error] {
	return func(yield func(repair.Flow, error) bool) {
		for k, err := range g.strays.Events(ctx) {
			if !yield(flowOfKey(k), err) {
				return
			}
		}
	}
}

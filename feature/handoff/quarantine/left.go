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

// A load balancer that reboots, or forgets a silent session, routes its packets by the hash, perhaps to a former
// backend of the session. That backend must not answer, or the client is reset. The quarantine remembers departed
// sessions, and the agent reports their destination to the load balancer.

const (
	// maxLeft is the maximum of remembered sessions. The quarantine has room for as many sessions under way.
	maxLeft = 1 << 15
	// leftAfter is the time for which the quarantine first stays shut: the load balancer may still send packets to be
	// returned.
	leftAfter = time.Second
)

// Leaves records the departure of a session, after a delay. It calls failed on errors.
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
		return nil // it has returned, or belongs to a later move
	} else if err != nil {
		return fmt.Errorf("quarantine of %s: %w", f, err)
	}
	v.What, v.Since, v.Ifindex, v.Returned = uint32(Left), 0, uint32(to), 0
	if err := g.sessions.Update(quarantineKey(f), &v, ebpf.UpdateExist); err != nil {
		return fmt.Errorf("quarantine of %s: %w", f, err)
	}
	g.gone = append(g.gone, f)
	for len(g.gone) > maxLeft {
		if now, ok, err := g.Lookup(g.gone[0]); err == nil && ok && now.State == Left {
			_ = g.sessions.Delete(quarantineKey(g.gone[0])) // a new connection may have removed it
		}
		g.gone = g.gone[1:]
	}
	return nil
}

// BackTo reverts a failed arrival: an earlier departure of the session is recorded again.
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
		return fmt.Errorf("quarantine of %s: %w", f, err)
	}
	return nil
}

// Strays yields departed sessions with packets still arriving here, until Close or the end of ctx.
func (g *Quarantine) Strays(ctx context.Context) iter.Seq2[repair.Flow, error] {
	return func(yield func(repair.Flow, error) bool) {
		for k, err := range g.strays.Events(ctx) {
			if !yield(flowOfKey(k), err) {
				return
			}
		}
	}
}

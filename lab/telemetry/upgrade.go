// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"time"
)

// upgraded is the state of a stage before upgrades.
type upgraded struct {
	*stage
	calm             map[int]bool
	strays, rejected int
	held             []int
}

// upgrade replaces the running programs of every service at once, several times, while all routers send.
// Each packet meets the old or the new program, and none may notice a difference.
func (x *experiment) upgrade(ctx context.Context) error {
	if x.weir == nil {
		return nil
	}
	var all []upgraded
	for _, s := range append([]*stage{x.stage}, x.fast...) {
		u := upgraded{stage: s, calm: s.ledger.undisturbed(len(s.collectors))}
		before := s.endEpoch(u.calm)
		if err := s.ledger.drain(ctx, before.epoch, before.calm, drainLimit); err != nil {
			return err
		}
		u.strays, u.rejected, u.held = s.ledger.strays(), s.ledger.rejections(), s.sessions()
		all = append(all, u)
	}
	x.say("weir upgrade, %d times, to another build and back: its programs replace the running ones under traffic", x.plan.upgrades)
	if err := x.weir.Rebuild(); err != nil {
		return err
	}
	for range x.plan.upgrades {
		if _, err := x.weir.Upgrade(ctx); err != nil {
			return err
		}
		if err := pause(ctx, 300*time.Millisecond); err != nil {
			return err
		}
	}
	misdirected, lost, touched := 0, 0, 0
	for _, u := range all {
		u.service.Reopen()
		if err := u.rejectsElsewhere(ctx, nil); err != nil {
			return err
		}
		during := u.endEpoch(u.calm)
		if err := u.ledger.drain(ctx, during.epoch, during.calm, drainLimit); err != nil {
			return err
		}
		misdirected += u.ledger.strays() - u.strays
		lost += u.ledger.lostRecords(during.epoch)
		touched += u.ledger.rejections() - u.rejected + u.touched(u.held)
	}
	x.result.Set("upgrades", float64(x.plan.upgrades))
	x.result.Set("misdirected_during_upgrade", float64(misdirected))
	x.result.Set("lost_during_upgrade", float64(lost))
	x.result.Set("touched_during_upgrade", float64(touched))
	return x.killAfterUpgrade(ctx)
}

// killAfterUpgrade kills one sink of each service once more. The new programs withdraw its slot, and the
// weir serve running all the time returns it.
func (x *experiment) killAfterUpgrade(ctx context.Context) error {
	var steps []func(context.Context) error
	for _, s := range x.fast {
		s.kills.restarts = s.restarted + 1
		steps = append(steps, s.killAndReturn)
	}
	return x.together(ctx, steps...)
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"

	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/steer"
	svc "github.com/weir-project/weir/service"
)

// newKeeper makes the keeper of weir serve. Who may hand over sessions of a service is
// whoever the configuration makes a member of one of its slots.
func (h *Host) newKeeper(o ServeOptions) *keeper.Keeper {
	return keeper.New(keeper.Options{Log: o.Log, Allow: h.allowHandoff, Store: keeper.Store()})
}

// inherit takes what the weir serve before left with systemd.
func inherit(k *keeper.Keeper, log *slog.Logger) {
	files, err := keeper.Inherited()
	if err = errors.Join(err, k.Inherit(files)); err != nil {
		log.Warn("not all that waited for a member could be taken over", "reason", err)
	}
}

// allowHandoff is a keeper's Options.Allow. A name that is the number of a slot with a member is for that member alone:
// steering knows a slot's member by it.
func (h *Host) allowHandoff(ctx context.Context, service, name string, p keeper.Peer) error {
	members, err := steer.ConfiguredMembers(h.Root, service)
	if err != nil {
		return fmt.Errorf("process %d of user %d: %w", p.PID, p.UID, err)
	}
	slot, err := strconv.Atoi(name)
	named := err == nil && slices.ContainsFunc(members, func(m svc.Member) bool { return m.Slot == slot })
	other := -1
	for _, m := range members {
		switch {
		case !keeper.Matches(ctx, m, p):
		case !named || m.Slot == slot:
			return nil
		default:
			other = m.Slot
		}
	}
	if other >= 0 {
		return fmt.Errorf("process %d of user %d is the member of slot %d of service %q, not of slot %d: let it take the number of its own slot as its name", p.PID, p.UID, other, service, slot)
	}
	return fmt.Errorf("process %d of user %d is no member of service %q: root is, and the members that weir.yaml names for its slots, by user: %d for one", p.PID, p.UID, service, p.UID)
}

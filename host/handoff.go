// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"

	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/steer"
)

// newKeeper makes the keeper of weir serve. Who may hand over sessions of a service is
// whoever the configuration makes a member of one of its slots.
func (h *Host) newKeeper(o ServeOptions) *keeper.Keeper {
	return keeper.New(keeper.Options{Log: o.Log, Allow: h.allowHandoff})
}

// allowHandoff is a keeper's Options.Allow.
func (h *Host) allowHandoff(ctx context.Context, service string, p keeper.Peer) error {
	members, err := steer.ConfiguredMembers(h.Root, service)
	if err != nil {
		return fmt.Errorf("process %d of user %d: %w", p.PID, p.UID, err)
	}
	for _, m := range members {
		if keeper.Matches(ctx, m, p) {
			return nil
		}
	}
	return fmt.Errorf("process %d of user %d is no member of service %q: root is, and the members that weir.yaml names for its slots, by user: %d for one", p.PID, p.UID, service, p.UID)
}

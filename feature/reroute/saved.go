// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Restorer = Feature{}

// saved is the pinned state of rerouting, by network namespace.
type saved struct {
	Protect  []protect.Saved  `json:"protect,omitempty"`
	Liveness []liveness.Saved `json:"liveness,omitempty"`
	Peers    []peers.Saved    `json:"peers,omitempty"`
}

// Save implements feature.Restorer. Keys stay in their files and are read again by a restore.
func (Feature) Save(ctx context.Context, r *kernel.Root) ([]byte, error) {
	st, err := ReadState(ctx, r)
	if err != nil {
		return nil, err
	}
	return json.Marshal(saved{st.protect.Saved(), st.live.Saved(), st.peers.Saved()})
}

// PlanRestore implements feature.Restorer.
func (Feature) PlanRestore(ctx context.Context, r *kernel.Root, text []byte) (plan feature.Plan, err error) {
	var s saved
	if err := json.Unmarshal(text, &s); err != nil {
		return plan, fmt.Errorf("the saved reroute: %w", err)
	}
	have, err := ReadState(ctx, r)
	if err != nil {
		return plan, err
	}
	find := func(ref string, id netns.ID, of string) (string, bool) {
		now, lost := netns.Reference(ref, id)
		if errors.Is(lost, netns.ErrGone) {
			plan.Warn("%s of %s: its network namespace is gone", of, id)
			return "", false
		}
		err = errors.Join(err, lost)
		return now, lost == nil
	}
	var ways protect.Config
	for _, w := range s.Protect {
		for _, p := range w.Paths {
			var there bool
			if p.Netns, there = find(p.Netns, w.ID, "reroute of path "+p.Name); there {
				ways.Paths = append(ways.Paths, p)
			}
		}
	}
	var sessions []liveness.Config
	for _, l := range s.Liveness {
		var there bool
		if l.Config.Netns, there = find(l.Config.Netns, l.ID, "liveness"); there {
			sessions = append(sessions, l.Config)
		}
	}
	var neighbours []peers.Config
	for _, n := range s.Peers {
		var there bool
		if n.Config.Netns, there = find(n.Config.Netns, n.ID, "BFD"); there {
			neighbours = append(neighbours, n.Config)
		}
	}
	if err != nil {
		return plan, err
	}
	a, err := protect.Plan(ctx, have.protect, ways)
	if err != nil {
		return plan, err
	}
	b, err := liveness.PlanAll(ctx, have.live, sessions)
	if err != nil {
		return plan, err
	}
	c, err := peers.Plan(ctx, have.peers, neighbours)
	for _, p := range []feature.Plan{a, b, c} {
		plan.Join(p)
	}
	return plan, err
}

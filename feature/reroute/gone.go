// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// goneRemedy is the remedy for a deleted namespace.
const goneRemedy = "run weir serve, or weir apply: both remove the rest"

// removeGone removes the pins of deleted namespaces and logs this.
func removeGone(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	return feature.Follower{Feature: Name, Lacks: isGone, Adopt: dropGone}.Run(ctx, r, log)
}

// isGone reports whether the namespace of an instance is gone.
func isGone(r *kernel.Root, i kernel.Instance, watch func(ref string, id netns.ID)) (bool, error) {
	m, err := r.Meta(i)
	if err != nil {
		return false, err
	}
	var at struct {
		Netns string `json:"netns"` // common to all parts: the configuration's reference to the namespace
	}
	if err := json.Unmarshal(m.Config, &at); err != nil || at.Netns == "" {
		return false, nil // not of a configuration
	}
	watch(at.Netns, m.ID())
	ns, err := netns.Find(at.Netns, m.ID())
	if err == nil {
		ns.Close()
	}
	if errors.Is(err, netns.ErrGone) {
		return true, nil
	}
	return false, err
}

// dropGone removes all instances of a deleted namespace when called for the first of them.
func dropGone(l *kernel.WriteLock, i kernel.Instance) (string, error) {
	all, err := l.Instances(Name)
	if err != nil {
		return "", err
	}
	mine := false
	for _, o := range all {
		if o.Scope != i.Scope {
			continue
		}
		mine = mine || o == i
		if gone, err := isGone(l.Root, o, func(string, netns.ID) {}); err == nil && !gone { // an unreadable one is removed with the others
			return "stays: its network namespace is there", nil
		}
	}
	if !mine {
		return "", kernel.ErrNotExist
	}
	return fmt.Sprintf("removed: its network namespace is gone, net:[%s]", i.Scope),
		errors.Join(engine.RemoveScope(l, i.Scope), liveness.DropGone(l, i.Scope), protect.DropGone(l, i.Scope))
}

// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"

	"github.com/weir-project/weir/internal/netns"
)

// FindNetns opens the namespace of a service: the configured one, else the namespace of a running member, because a
// container has its own, else weir's own. certain is false for the last: members may still start elsewhere. A namespace
// of another user namespace must be configured: any user could otherwise draw a service with a slot of his into one.
func (s Spec) FindNetns(ctx context.Context) (ns *netns.Handle, certain bool, err error) {
	if s.Netns != "" {
		ns, err = netns.Open(s.Netns)
		return ns, true, err
	}
	for _, m := range s.Members {
		pids, err := m.Processes(ctx)
		if err != nil || len(pids) == 0 {
			continue
		}
		ns, err := netns.OfPID(pids[0])
		switch {
		case err != nil:
		case ns.Ours():
			return ns, true, nil
		default:
			ns.Close()
		}
	}
	ns, err = netns.Current()
	return ns, false, err
}

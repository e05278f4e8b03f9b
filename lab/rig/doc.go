// SPDX-License-Identifier: Apache-2.0

// Package rig is the host that telemetry experiments and tests share: the network around it, weir on it as
// its users run it, and the kernel's own view of its sockets.
package rig

import (
	"context"
	"time"
)

// pollInterval is how often something is looked for whose time is measured.
const pollInterval = 2 * time.Millisecond

// pause waits, unless the run ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

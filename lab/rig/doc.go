// SPDX-License-Identifier: Apache-2.0

// Package rig is the host shared by telemetry experiments and tests. It holds the network around the host,
// weir with its user interface, and the kernel's view of the sockets.
package rig

import (
	"context"
	"time"
)

// pollInterval is the interval of polls for timed events.
const pollInterval = 2 * time.Millisecond

// pause waits for d, or for the end of the run.
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

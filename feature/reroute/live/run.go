// SPDX-License-Identifier: Apache-2.0

package live

import (
	"context"
	"fmt"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// Run supervises metronomes as long as there is a process to do it: a loop that has lost its packet, or was revived on another
// CPU, is put back, and devices that come later get their sessions. It looks once a second. Nothing of detection needs it.
func Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		if wrong := examineRunning(ctx, r); wrong != "" {
			if err := mendNow(ctx, r); err != nil && ctx.Err() == nil {
				log.Warn("liveness is not as it should be", "what", wrong, "reason", err)
			} else if err == nil {
				log.Info("liveness was set right", "what", wrong)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// examineRunning says what is not as it should be, "" if nothing is.
func examineRunning(ctx context.Context, r *kernel.Root) string {
	st, err := ReadState(ctx, r)
	if err != nil {
		return ""
	}
	for _, l := range st.Loops {
		if l.Silent > time.Second {
			return fmt.Sprintf("the loop of CPU %d does not beat", l.CPU)
		}
		if l.CPU >= 0 && int(l.On) != l.CPU {
			return fmt.Sprintf("the loop of CPU %d beats on CPU %d", l.CPU, l.On)
		}
	}
	for _, s := range st.Sessions {
		if s.Problem != "" && deviceAppeared(st, s) {
			return fmt.Sprintf("device %s of session %s has come", s.Device, s.Name)
		}
	}
	return ""
}

func mendNow(ctx context.Context, r *kernel.Root) error {
	l, err := r.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	return Mend(l)
}

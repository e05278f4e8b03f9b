// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/service"
)

func steerRegister(g *globals) *cobra.Command {
	var m service.Member
	slot := -1
	var wait time.Duration
	var bound []string
	var resets resetFlags
	c := &cobra.Command{
		Use: "register SERVICE --slot N", Short: "Give a slot to its member, waiting until all its sockets are there", Args: cobra.ExactArgs(1),
		Long: `Give a slot to its member once all its sockets are there: to the member that the
configuration names, or to the process named here. weir serve does this by
itself; without it, a unit does:

  ExecStartPost=weir steer register telemetry --slot 0 --pid $MAINPID`,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := slotOf(cmd, g, args[0], slot)
			if err != nil {
				return err
			}
			named, err := namedMember(m, slot, bound)
			if err != nil {
				return err
			}
			changed, err := registerWaiting(cmd.Context(), g, s, named, wait)
			if err == nil && !changed {
				fmt.Fprintf(cmd.OutOrStdout(), "slot %d of %s has it already\n", slot, args[0])
			}
			if err != nil || !changed {
				return err
			}
			return resets.resetDue(g)
		},
	}
	c.Flags().IntVar(&slot, "slot", -1, "number of the slot")
	c.Flags().IntVar(&m.PID, "pid", 0, "the member's process")
	c.Flags().StringVar(&m.PIDFile, "pidfile", "", "file with the number of the member's process")
	c.Flags().StringVar(&m.Unit, "unit", "", "the member's systemd unit")
	c.Flags().StringVar(&m.Cgroup, "cgroup", "", "the member's cgroup, from the root of cgroup2")
	c.Flags().StringSliceVar(&bound, "bound", nil, "where its sockets are bound, one for each listen, if not there")
	resets.addRate(c)
	c.Flags().DurationVar(&wait, "wait", time.Minute, "wait so long for its sockets")
	return c
}

// namedMember is the member that the flags name, or nil for the configured one.
func namedMember(m service.Member, slot int, bound []string) (*service.Member, error) {
	if m.String() == "none" {
		if len(bound) > 0 {
			return nil, usageError{fmt.Errorf("--bound goes with --pid, --pidfile, --unit or --cgroup")}
		}
		return nil, nil
	}
	m.Slot = slot
	for _, b := range bound {
		l, err := service.ParseListen(b)
		if err != nil {
			return nil, usageError{err}
		}
		m.Bound = append(m.Bound, l)
	}
	return &m, nil
}

// registerWaiting tries until the member is whole. The lock is not held while
// it waits.
func registerWaiting(ctx context.Context, g *globals, s steer.Slot, m *service.Member, wait time.Duration) (bool, error) {
	deadline := time.Now().Add(wait)
	for {
		l, err := g.host().Root.Lock(ctx)
		if err != nil {
			return false, err
		}
		changed, err := steer.Register(ctx, l, s, m)
		l.Unlock()
		if err == nil || !steer.Waiting(err) {
			return changed, err
		}
		if time.Now().After(deadline) {
			return false, fmt.Errorf("slot %d of %s stays empty after %s: %w", s.Slot, s.Service, strings.TrimSuffix(wait.String(), "0s"), err)
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func steerUnregister(g *globals) *cobra.Command {
	slot := -1
	c := &cobra.Command{
		Use: "unregister SERVICE --slot N", Short: "Withdraw a slot: its traffic meets on_empty until it is registered again", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := slotOf(cmd, g, args[0], slot)
			if err != nil {
				return err
			}
			l, err := g.host().Root.Lock(cmd.Context())
			if err != nil {
				return err
			}
			defer l.Unlock()
			return steer.Unregister(l, s)
		},
	}
	c.Flags().IntVar(&slot, "slot", -1, "number of the slot")
	return c
}

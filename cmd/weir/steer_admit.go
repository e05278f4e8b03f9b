// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/steer/engine"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/service"
)

func steerAdmit(g *cli.Globals) *cobra.Command {
	var m service.Member
	slot := -1
	var wait time.Duration
	var bound []string
	var resets resetFlags
	c := &cobra.Command{
		Use:   "admit SERVICE --slot N",
		Short: "Give a slot to its configured member or to another process", Args: cobra.ExactArgs(1),
		Long: `Give a slot to a member once all its sockets exist and its check, if configured,
has passed. The member is the one of the configuration, or the process of --pid,
--pidfile, --unit or --cgroup. weir serve does this by itself. Without it, a unit
can:

  ExecStartPost=weir steer admit telemetry --slot 0 --pid $MAINPID

A collector can also register itself: see weir serve --register-socket.`,
		Example: `  weir steer admit telemetry --slot 0
  weir steer admit telemetry --slot 1 --unit nfacctd@1.service --wait 5s`,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := findSlot(cmd, g, args[0], slot)
			if err != nil {
				return err
			}
			named, err := namedMember(m, slot, bound)
			if err != nil {
				return err
			}
			changed, err := engine.AdmitWithin(cmd.Context(), g.Host().Root, s, named, wait)
			if err == nil && !changed {
				fmt.Fprintf(cmd.OutOrStdout(), "slot %d of %s has this member already\n", slot, args[0])
			}
			if err != nil || !changed {
				return err
			}
			return resets.resetDue(g)
		},
	}
	c.Flags().IntVar(&slot, "slot", -1, "number of the slot")
	processFlags(c, &m)
	c.Flags().StringSliceVar(&bound, "bound", nil, "addresses of its sockets, one for each listen, if they differ")
	resets.addRate(c)
	c.Flags().DurationVar(&wait, "wait", time.Minute, "maximum time to wait for its sockets")
	return c
}

// processFlags adds the flags that name a process.
func processFlags(c *cobra.Command, m *service.Member) {
	c.Flags().IntVar(&m.PID, "pid", 0, "process of the member")
	c.Flags().StringVar(&m.PIDFile, "pidfile", "", "file with the PID of the member")
	c.Flags().StringVar(&m.Unit, "unit", "", "systemd unit of the member")
	c.Flags().StringVar(&m.Cgroup, "cgroup", "", "cgroup of the member, from the root of cgroup2")
}

// namedMember returns the member named by the flags, or nil for the configured member.
func namedMember(m service.Member, slot int, bound []string) (*service.Member, error) {
	if m.String() == "none" {
		if len(bound) > 0 {
			return nil, cli.Usage(fmt.Errorf("--bound goes with --pid, --pidfile, --unit or --cgroup"))
		}
		return nil, nil
	}
	m.Slot = slot
	var err error
	if m.PIDFile != "" {
		if m.PIDFile, err = filepath.Abs(m.PIDFile); err != nil { // weir serve has another working directory
			return nil, err
		}
	}
	m.Bound, err = parseBound(bound)
	return &m, err
}

func parseBound(texts []string) ([]service.Listen, error) {
	var out []service.Listen
	for _, b := range texts {
		l, err := service.ParseListen(b)
		if err != nil {
			return nil, cli.Usage(err)
		}
		out = append(out, l)
	}
	return out, nil
}

func steerWithdraw(g *cli.Globals) *cobra.Command {
	slot := -1
	c := &cobra.Command{
		Use:   "withdraw SERVICE --slot N",
		Short: "Withdraw a slot from its member", Args: cobra.ExactArgs(1),
		Long: `Take a slot from its member. Traffic of every protocol then follows on_empty until
weir steer admit gives the slot to a member again. weir serve does not admit one.`,
		Example: `  weir steer withdraw telemetry --slot 0`,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := findSlot(cmd, g, args[0], slot)
			if err != nil {
				return err
			}
			l, err := g.Host().Root.Lock(cmd.Context())
			if err != nil {
				return err
			}
			defer l.Unlock()
			return engine.Withdraw(l, s)
		},
	}
	c.Flags().IntVar(&slot, "slot", -1, "number of the slot")
	return c
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/internal/netns"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

func steerRegister(g *globals) *cobra.Command {
	var m service.Member
	slot := -1
	var wait time.Duration
	var bound []string
	var resets resetFlags
	var in netnsFlag
	c := &cobra.Command{
		Use:   "register SERVICE {--slot N | [tcp|udp ADDRESS PORT]}",
		Short: "Give a slot to its member, or register a socket for what is bound to a service", Args: registerArgs(&slot),
		Long: `With --slot, give a slot of a service of the configuration to its member once all
its sockets are there and its check, if the configuration has one, has passed: to
the member that the configuration names, or to the process named here. weir serve
does this by itself; without it, a unit does:

  ExecStartPost=weir steer register telemetry --slot 0 --pid $MAINPID

Without, register the socket that a process has bound to an address and port: it
gets what weir bind add binds to the service, by its protocol and family (a
dual-stack socket both, unless one of IPv4 is registered), until it closes or
another takes its place. A socket in a reuseport group stands for the group. With
no address, register the sockets that were passed (LISTEN_FDS).`,
		Example: `  weir steer register telemetry --slot 0
  weir steer register www tcp 127.0.0.1 8080 --pid $MAINPID
  weir steer register dns udp :: 5353 --unit dns.service
  weir steer register www               # in a unit with socket activation`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if slot < 0 {
				return registerSockets(cmd, g, m, in, args, wait)
			}
			s, err := slotOf(cmd, g, args[0], slot)
			if err != nil {
				return err
			}
			named, err := namedMember(m, slot, bound)
			if err != nil {
				return err
			}
			changed, err := engine.AdmitWithin(cmd.Context(), g.host().Root, s, named, wait)
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
	in.add(c)
	return c
}

func registerArgs(slot *int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if *slot >= 0 || len(args) != 4 {
			return cobra.ExactArgs(1)(cmd, args)
		}
		return nil
	}
}

// registerSockets registers a process's socket, or those that were passed.
func registerSockets(cmd *cobra.Command, g *globals, m service.Member, in netnsFlag, args []string, wait time.Duration) error {
	var kinds []string
	var err error
	switch {
	case len(args) == 1 && m.String() == "none":
		err = in.locked(cmd, g, func(l *kernel.WriteLock, ns *netns.Handle) (err error) {
			kinds, err = bindings.RegisterPassed(l, ns, args[0])
			return err
		})
	case len(args) == 1 || m.String() == "none":
		return usageError{errors.New("a process's socket is named by protocol, address and port, and --pid, --pidfile, --unit or --cgroup")}
	default:
		at, perr := service.ParseListen(args[1] + " " + net.JoinHostPort(args[2], args[3]))
		if perr != nil {
			return usageError{perr}
		}
		kinds, err = bindings.RegisterWithin(cmd.Context(), g.host().Root, args[0], in.ref, m, at, wait)
	}
	if err != nil {
		return slotMissing(err)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "registered for %s: %s\n", args[0], strings.Join(kinds, ", "))
	return nil
}

// slotMissing has a service of the configuration without a slot be wrong usage.
func slotMissing(err error) error {
	if errors.Is(err, bindings.ErrConfigured) {
		return usageError{err}
	}
	return err
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
			return nil, usageError{err}
		}
		out = append(out, l)
	}
	return out, nil
}

func steerUnregister(g *globals) *cobra.Command {
	slot := -1
	var in netnsFlag
	c := &cobra.Command{
		Use:   "unregister SERVICE {--slot N | [tcp4|udp4|tcp6|udp6…]}",
		Short: "Withdraw a slot, or the sockets registered for a service", Args: cobra.MinimumNArgs(1),
		Long: `With --slot, withdraw a slot: its traffic meets on_empty until it is registered
again. Without, take away the sockets that are registered for a service, of the
kinds named here or all: what is bound to it is rejected until others are
registered.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if slot < 0 {
				for _, kind := range args[1:] {
					if !slices.Contains([]string{"udp4", "tcp4", "udp6", "tcp6"}, kind) {
						return usageError{fmt.Errorf("%q: want udp4, tcp4, udp6 or tcp6", kind)}
					}
				}
				return in.locked(cmd, g, func(l *kernel.WriteLock, ns *netns.Handle) error {
					were, err := bindings.UnregisterSockets(l, ns, args[0], args[1:]...)
					if err == nil {
						fmt.Fprintf(cmd.OutOrStdout(), "no longer registered for %s: %s\n", args[0], strings.Join(were, ", "))
					}
					return slotMissing(err)
				})
			}
			if len(args) > 1 {
				return usageError{errors.New("a slot is withdrawn for every kind of traffic")}
			}
			s, err := slotOf(cmd, g, args[0], slot)
			if err != nil {
				return err
			}
			l, err := g.host().Root.Lock(cmd.Context())
			if err != nil {
				return err
			}
			defer l.Unlock()
			return engine.Unregister(l, s)
		},
	}
	c.Flags().IntVar(&slot, "slot", -1, "number of the slot")
	in.add(c)
	return c
}

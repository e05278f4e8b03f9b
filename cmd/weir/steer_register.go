// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/internal/netns"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

func steerRegister(g *cli.Globals) *cobra.Command {
	var m service.Member
	var wait time.Duration
	var in netnsFlag
	var slots formerSlot
	c := &cobra.Command{
		Use:   "register SERVICE [tcp|udp ADDRESS PORT]",
		Short: "Register a process's socket for what is bound to a service", Args: slots.before(registerArgs),
		Long: `Register the socket that a process has bound to an address and port: it gets what
weir bind add binds to the service, by its protocol and family (a dual-stack
socket both, unless one of IPv4 is registered), until it closes or another takes
its place. A socket in a reuseport group stands for the group. With no address,
register the sockets that were passed (LISTEN_FDS).

weir steer admit gives a slot of a service of the configuration to a process.`,
		Example: `  weir steer register www tcp 127.0.0.1 8080 --pid $MAINPID
  weir steer register dns udp :: 5353 --unit dns.service
  weir steer register www               # in a unit with socket activation`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return registerSockets(cmd, g, m, in, args, wait)
		},
	}
	processFlags(c, &m)
	c.Flags().DurationVar(&wait, "wait", time.Minute, "wait so long for its sockets")
	in.add(c)
	slots.add(c, "admit", "bound", "rate")
	return c
}

// formerSlot rejects the former flag --slot of register and unregister, and names the new command.
type formerSlot struct{ now string }

func (f *formerSlot) add(c *cobra.Command, now string, others ...string) {
	f.now = now
	for _, name := range append(others, "slot") {
		c.Flags().String(name, "", "flag of weir steer "+now)
		_ = c.Flags().MarkHidden(name)
	}
}

// before rejects the flags before args are checked.
func (f *formerSlot) before(args cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, given []string) error {
		for _, name := range []string{"slot", "bound", "rate"} {
			if cmd.Flags().Changed(name) {
				return cli.Usage(fmt.Errorf("%s --%s is weir steer %s --%s now", cmd.CommandPath(), name, f.now, name))
			}
		}
		return args(cmd, given)
	}
}

func registerArgs(cmd *cobra.Command, args []string) error {
	if len(args) != 4 {
		return cobra.ExactArgs(1)(cmd, args)
	}
	return nil
}

// registerSockets registers a process's socket, or the passed sockets (LISTEN_FDS).
func registerSockets(cmd *cobra.Command, g *cli.Globals, m service.Member, in netnsFlag, args []string, wait time.Duration) error {
	var kinds []string
	var err error
	switch {
	case len(args) == 1 && m.String() == "none":
		err = in.locked(cmd, g, func(l *kernel.WriteLock, ns *netns.Handle) (err error) {
			kinds, err = bindings.RegisterPassed(l, ns, args[0])
			return err
		})
	case len(args) == 1 || m.String() == "none":
		return cli.Usage(errors.New("a process's socket is named by protocol, address and port, and --pid, --pidfile, --unit or --cgroup"))
	default:
		at, perr := service.ParseListen(args[1] + " " + net.JoinHostPort(args[2], args[3]))
		if perr != nil {
			return cli.Usage(perr)
		}
		kinds, err = bindings.RegisterWithin(cmd.Context(), g.Host().Root, args[0], in.ref, m, at, wait)
	}
	if err != nil {
		return slotMissing(err)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "registered for %s: %s\n", args[0], strings.Join(kinds, ", "))
	return nil
}

// slotMissing turns an error about a configured service into a usage error, because its members have slots.
func slotMissing(err error) error {
	if errors.Is(err, bindings.ErrConfigured) {
		return cli.Usage(err)
	}
	return err
}

func steerUnregister(g *cli.Globals) *cobra.Command {
	var in netnsFlag
	var slots formerSlot
	c := &cobra.Command{
		Use:   "unregister SERVICE [tcp4|udp4|tcp6|udp6…]",
		Short: "Take away the sockets registered for a service", Args: slots.before(cobra.MinimumNArgs(1)),
		Long: `Take away the sockets that are registered for a service, of the kinds named here
or all: what is bound to it is rejected until others are registered.

weir steer withdraw takes a slot from its member.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, kind := range args[1:] {
				if !slices.Contains([]string{"udp4", "tcp4", "udp6", "tcp6"}, kind) {
					return cli.Usage(fmt.Errorf("%q: want udp4, tcp4, udp6 or tcp6", kind))
				}
			}
			return in.locked(cmd, g, func(l *kernel.WriteLock, ns *netns.Handle) error {
				were, err := bindings.UnregisterSockets(l, ns, args[0], args[1:]...)
				if err == nil {
					fmt.Fprintf(cmd.OutOrStdout(), "no longer registered for %s: %s\n", args[0], strings.Join(were, ", "))
				}
				return slotMissing(err)
			})
		},
	}
	in.add(c)
	slots.add(c, "withdraw")
	return c
}

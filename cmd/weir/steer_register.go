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
		Short: "Register a process's socket for the bindings of a service", Args: slots.before(registerArgs),
		Long: `Register a process's socket bound to an address and port. It receives the traffic
bound to the service with weir bind add, by its protocol and family, until it
closes or another socket replaces it. A dual-stack socket receives both families,
unless an IPv4 socket is registered. A socket in a reuseport group represents the
group. Without an address, the passed sockets (LISTEN_FDS) are registered.

For a slot of a configured service, use weir steer admit.`,
		Example: `  weir steer register www tcp 127.0.0.1 8080 --pid $MAINPID
  weir steer register dns udp :: 5353 --unit dns.service
  weir steer register www               # in a unit with socket activation`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return registerSockets(cmd, g, m, in, args, wait)
		},
	}
	processFlags(c, &m)
	c.Flags().DurationVar(&wait, "wait", time.Minute, "maximum time to wait for its sockets")
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
				return cli.Usage(fmt.Errorf("%s --%s is now weir steer %s --%s", cmd.CommandPath(), name, f.now, name))
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
		return cli.Usage(errors.New("name the socket by protocol, address and port, and the process by --pid, --pidfile, --unit or --cgroup"))
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
		Short: "Remove the sockets registered for a service", Args: slots.before(cobra.MinimumNArgs(1)),
		Long: `Remove the registered sockets of a service, of the given kinds or all. Its traffic
is rejected until other sockets are registered.

For a slot of a configured service, use weir steer withdraw.`,
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/internal/netns"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

// bindCommand returns weir bind.
func bindCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "bind", Short: "Bind prefixes and ports to services",
		Long: `Bindings send the traffic of prefixes and ports to services: to services of the
configuration, or to sockets registered with weir steer register. A binding
belongs to one network namespace, and survives weir apply.`,
	}
	c.AddCommand(bindAdd(g), bindRemove(g), bindList(g), bindLoad(g), bindReplace(g))
	return c
}

// movedToBind returns the former subcommands of weir steer. They change nothing and name the new command.
func movedToBind() (out []*cobra.Command) {
	for _, c := range []struct{ old, now string }{{"bind", "add"}, {"unbind", "remove"}, {"bindings", "list"}, {"load", "load"}, {"replace", "replace"}} {
		out = append(out, &cobra.Command{
			Use: c.old, Short: "Renamed to weir bind " + c.now, Hidden: true, FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true},
			RunE: func(*cobra.Command, []string) error {
				return cli.Usage(fmt.Errorf("weir steer %s is now weir bind %s: see weir bind %s --help", c.old, c.now, c.now))
			},
		})
	}
	return out
}

// netnsFlag is the flag --netns.
type netnsFlag struct{ ref string }

func (f *netnsFlag) add(c *cobra.Command) {
	c.Flags().StringVar(&f.ref, "netns", "", "network namespace: name, path or pid:N (default: this one)")
}

func (f *netnsFlag) open() (*netns.Handle, error) {
	if f.ref == "" {
		return netns.Current()
	}
	return netns.Open(f.ref)
}

// scope returns the pin directory of the namespace.
func (f *netnsFlag) scope() (string, error) {
	ns, err := f.open()
	if err != nil {
		return "", err
	}
	defer ns.Close()
	return strconv.FormatUint(ns.Inode(), 10), nil
}

// locked runs do with the write lock and the namespace.
func (f *netnsFlag) locked(cmd *cobra.Command, g *cli.Globals, do func(l *kernel.WriteLock, ns *netns.Handle) error) error {
	ns, err := f.open()
	if err != nil {
		return err
	}
	defer ns.Close()
	return locked(cmd, g, func(l *kernel.WriteLock) error { return do(l, ns) })
}

// parseBinding parses SERVICE tcp|udp PREFIX PORT.
func parseBinding(args []string) (b bindings.Binding, err error) {
	b.Service = args[0]
	if err := b.Proto.UnmarshalText([]byte(args[1])); err != nil {
		return b, cli.Usage(err)
	}
	if b.Prefix, err = bindings.ParsePrefix(args[2]); err != nil {
		return b, cli.Usage(err)
	}
	if b.Port, err = parsePort(args[3]); err != nil {
		return b, cli.Usage(err)
	}
	return b, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("%q is not a port: want 1 to 65535, or 0 for every port", s)
	}
	return uint16(n), nil
}

func parseCovered(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return a, fmt.Errorf("--covers %q: want an address, like 192.0.2.7 or 2001:db8::7", s)
	}
	return a, nil
}

func bindAdd(g *cli.Globals) *cobra.Command {
	var in netnsFlag
	var allow outageFlag
	c := &cobra.Command{
		Use: "add SERVICE tcp|udp PREFIX PORT", Short: "Bind a prefix and port to a service", Args: cobra.ExactArgs(4),
		Long: `Send the traffic of a prefix and port to a service: a service of the
configuration, or one with sockets registered with weir steer register, before or
after. Port 0 means every port. The addresses need no interface, but their packets
must reach this host: ip route add local PREFIX dev lo.

The longest prefix wins. Within a prefix, a port wins over every port. Traffic
bound to a service without a socket is rejected. The command fails if that would
take traffic from a process, or from a service with a socket, unless
--allow-outage is given.`,
		Example: `  weir bind add www tcp 192.0.2.0/24 80
  weir bind add game udp 2001:db8:7::/64 0      # every port`,
		RunE: func(cmd *cobra.Command, args []string) error {
			b, err := parseBinding(args)
			if err != nil {
				return err
			}
			if err := bindings.CheckUnicast(b.Prefix); err != nil {
				return cli.Usage(err)
			}
			return in.locked(cmd, g, func(l *kernel.WriteLock, ns *netns.Handle) error {
				if err := allow.refuseBindings(cmd, l, ns, []bindings.Binding{b}, true); err != nil {
					return err
				}
				was, err := bindings.Bind(l, ns, b)
				if err == nil {
					warnConflicts(cmd, l, ns, b)
				}
				switch {
				case err != nil:
				case was == b.Service:
					fmt.Fprintf(cmd.OutOrStdout(), "%s is bound already\n", b)
				case was != "":
					fmt.Fprintf(cmd.OutOrStdout(), "%s, no longer to %s\n", b, was)
				}
				return err
			})
		},
	}
	in.add(c)
	allow.add(c)
	return c
}

// refuseBindings rejects bindings that take served traffic to a service without a socket.
func (f outageFlag) refuseBindings(cmd *cobra.Command, l *kernel.WriteLock, ns *netns.Handle, want []bindings.Binding, keep bool) error {
	if f {
		return nil
	}
	plan, err := steer.OutagesOfBindings(cmd.Context(), l.Root, l, ns, want, keep)
	if err != nil {
		return err
	}
	return plan.Refuse(false)
}

// warnConflicts warns of traffic taken from other services by new bindings.
func warnConflicts(cmd *cobra.Command, l *kernel.WriteLock, ns *netns.Handle, all ...bindings.Binding) {
	for _, w := range state.BindingConflicts(l.Root, ns, all...) {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", w)
	}
}

func bindRemove(g *cli.Globals) *cobra.Command {
	var in netnsFlag
	c := &cobra.Command{
		Use: "remove SERVICE tcp|udp PREFIX PORT", Short: "Remove a binding", Args: cobra.ExactArgs(4),
		RunE: func(cmd *cobra.Command, args []string) error {
			b, err := parseBinding(args)
			if err != nil {
				return err
			}
			return in.locked(cmd, g, func(l *kernel.WriteLock, ns *netns.Handle) error { return bindings.Unbind(l, ns, b) })
		},
	}
	in.add(c)
	return c
}

func bindList(g *cli.Globals) *cobra.Command {
	var in netnsFlag
	var proto, within, covers, port string
	var f bindings.BindingFilter
	c := &cobra.Command{
		Use: "list", Short: "List bindings", Args: cobra.NoArgs,
		Long: `List bindings, sorted by address. weir bind replace reads the output of --json.`,
		Example: `  weir bind list --covers 192.0.2.7
  weir bind list --json > bindings.json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := errors.Join(
				given(proto, f.Proto.UnmarshalText),
				given(within, func(s []byte) (err error) { f.Within, err = bindings.ParsePrefix(string(s)); return err }),
				given(covers, func(s []byte) (err error) { f.Covers, err = parseCovered(string(s)); return err }),
				given(port, func(s []byte) error {
					n, err := parsePort(string(s))
					f.Port = &n
					return err
				}))
			if err != nil {
				return cli.Usage(err)
			}
			scope, err := in.scope()
			if err != nil {
				return err
			}
			all, err := host.Ask[[]bindings.Binding](cmd.Context(), g.Reader(), spec.Name, "bindings", url.Values{"netns": {scope}})
			if err != nil {
				return err
			}
			chosen := all[:0]
			for _, b := range all {
				if f.Match(b) {
					chosen = append(chosen, b)
				}
			}
			if g.JSON {
				text, err := bindings.WriteBindings(chosen)
				if err == nil {
					_, err = fmt.Writer(cmd.OutOrStdout()).Write(append(text, '\n'))
				}
				return err
			}
			if len(chosen) == 0 {
				fmt.Fprintln(cmd.OutOrStdout(), "no bindings")
				return nil
			}
			printBindings(cmd.OutOrStdout(), chosen)
			return nil
		},
	}
	c.Flags().StringVar(&f.Service, "service", "", "only bindings to this service")
	c.Flags().StringVar(&proto, "proto", "", "only bindings of this protocol: tcp or udp")
	c.Flags().StringVar(&within, "within", "", "only prefixes within this prefix")
	c.Flags().StringVar(&covers, "covers", "", "only prefixes covering this address")
	c.Flags().StringVar(&port, "port", "", "only bindings of this port; 0: bindings of every port")
	in.add(c)
	cli.JSONFlag(c, g)
	return c
}

// given calls read with a flag's text, if the flag is set.
func given(text string, read func([]byte) error) error {
	if text == "" {
		return nil
	}
	return read([]byte(text))
}

func portName(port uint16) string {
	if port == 0 {
		return "every"
	}
	return fmt.Sprint(port)
}

func bindLoad(g *cli.Globals) *cobra.Command {
	return manyCommand(g, true, &cobra.Command{
		Use: "load [FILE]", Short: "Add the bindings of a file atomically",
		Long: `Add the bindings of a file to the existing ones atomically: a packet meets the
state before or after. The file is checked first, and an error in it changes
nothing. FILE is the output of weir bind list --json, or a file of tubular.
Without FILE, or with "-", standard input is read.`,
	})
}

func bindReplace(g *cli.Globals) *cobra.Command {
	return manyCommand(g, false, &cobra.Command{
		Use: "replace [FILE]", Short: "Replace all bindings with the contents of a file atomically",
		Long: `Replace all bindings with the contents of a file atomically: a packet meets all the old
bindings or all the new ones. The file is checked first, and an error in it
changes nothing. FILE is the output of weir bind list --json, or a file of
tubular. Without FILE, or with "-", standard input is read.`,
	})
}

func manyCommand(g *cli.Globals, keep bool, c *cobra.Command) *cobra.Command {
	var in netnsFlag
	var allow outageFlag
	var dry bool
	var lines int
	c.Args = cobra.MaximumNArgs(1)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			if info, err := os.Stdin.Stat(); err != nil || info.Mode()&os.ModeCharDevice != 0 {
				return cli.Usage(fmt.Errorf("name a file, or pipe one in: weir bind list --json | %s", cmd.CommandPath()))
			}
			args = []string{"-"}
		}
		line := cli.Reading(cmd, args[0])
		defer line.Stop()
		all, err := bindings.LoadBindingsFile(args[0])
		if err != nil {
			return err
		}
		if dry {
			scope, err := in.scope()
			if err != nil {
				return err
			}
			line.Step(fmt.Sprintf("comparing %d bindings", len(all)))
			diff, err := bindings.DiffBindings(g.Host().Root, scope, all, keep)
			line.Stop()
			if err == nil {
				printDiff(cmd.OutOrStdout(), diff, lines)
				in.foretell(cmd, g, all, keep)
			}
			return err
		}
		return in.locked(cmd, g, func(l *kernel.WriteLock, ns *netns.Handle) error {
			line.Step(fmt.Sprintf("checking the effect of %d bindings", len(all)))
			if err := allow.refuseBindings(cmd, l, ns, all, keep); err != nil {
				return err
			}
			line.Step(fmt.Sprintf("binding %d prefixes", len(all)))
			set := bindings.ReplaceBindings
			if keep {
				set = bindings.AddBindings
			}
			diff, err := set(l, ns, all)
			line.Stop()
			if err == nil {
				warnConflicts(cmd, l, ns, diff.Added...)
				printDiff(cmd.OutOrStdout(), diff, lines)
			}
			return err
		})
	}
	c.Flags().BoolVar(&dry, "dry-run", false, "print what would change, change nothing")
	c.Flags().IntVar(&lines, "lines", 100, "maximum number of changes to print")
	in.add(c)
	allow.add(c)
	return cut{remedy: "either all old bindings or all new ones are in force: see weir bind list, and run the command again to finish it"}.of(c)
}

// foretell prints the traffic lost by bindings, as far as this user's rights allow.
func (f *netnsFlag) foretell(cmd *cobra.Command, g *cli.Globals, all []bindings.Binding, keep bool) {
	ns, err := f.open()
	if err == nil {
		defer ns.Close()
		var plan feature.Plan
		if plan, err = steer.OutagesOfBindings(cmd.Context(), g.Host().Root, g.Host().Root, ns, all, keep); err == nil {
			printOutages(cmd, plan)
		}
	}
	if err != nil {
		fmt.Fprintln(cmd.ErrOrStderr(), "cannot determine the lost traffic:", err)
	}
}

func printDiff(w io.Writer, d bindings.Diff, lines int) {
	left := lines
	line := func(format string, args ...any) {
		if left--; left >= 0 {
			fmt.Fprintf(w, format, args...)
		}
	}
	for _, b := range d.Removed {
		line("- %s\n", b)
	}
	for _, b := range d.Moved {
		line("~ %s, no longer to %s\n", b.Binding, b.From)
	}
	for _, b := range d.Added {
		line("+ %s\n", b)
	}
	if left < 0 {
		fmt.Fprintf(w, "… and %d more (--lines)\n", -left)
	}
	fmt.Fprintf(w, "%d added, %d removed, %d moved, %d unchanged\n", len(d.Added), len(d.Removed), len(d.Moved), d.Same)
}

func steerServices(g *cli.Globals) *cobra.Command {
	var in netnsFlag
	c := &cobra.Command{
		Use: "services", Short: "List services with bindings, their sockets and counters", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			scope, err := in.scope()
			if err != nil {
				return err
			}
			all, err := host.Ask[[]bindings.Named](cmd.Context(), g.Reader(), spec.Name, "services", url.Values{"netns": {scope}})
			if err != nil {
				return err
			}
			if g.JSON {
				if all == nil {
					all = []bindings.Named{}
				}
				return cli.PrintJSON(cmd, all)
			}
			if len(all) == 0 {
				fmt.Fprintln(cmd.OutOrStdout(), "no bindings and no registered sockets")
				return nil
			}
			printNamed(cmd.OutOrStdout(), all)
			return nil
		},
	}
	in.add(c)
	cli.JSONFlag(c, g)
	return c
}

func printBindings(w io.Writer, all []bindings.Binding) {
	type row struct {
		Proto   bindings.Proto `table:"PROTOCOL"`
		Prefix  netip.Prefix   `table:"PREFIX"`
		Port    string         `table:"PORT"`
		Service string         `table:"SERVICE"`
	}
	var rows []row
	for _, b := range all {
		rows = append(rows, row{b.Proto, b.Prefix, portName(b.Port), b.Service})
	}
	cli.PrintRows(w, rows, time.Time{})
}

func printNamed(w io.Writer, all []bindings.Named) {
	type row struct {
		Service  string `table:"SERVICE"`
		Bindings int    `table:"BINDINGS"`
		Sockets  string `table:"SOCKETS"`
		Steered  uint64 `table:"STEERED"`
		Rejected uint64 `table:"REJECTED"`
		Failed   uint64 `table:"FAILED"`
	}
	var rows []row
	for _, n := range all {
		rows = append(rows, row{n.Service, n.Bindings, socketsText(n), n.Steered, n.Rejected, n.Failed})
	}
	cli.PrintRows(w, rows, time.Time{})
}

func socketsText(n bindings.Named) string {
	if n.Configured {
		return "configured slots"
	}
	var out []string
	for _, s := range n.Sockets {
		text := s.Kind
		if s.Local.IsValid() {
			text += " " + s.Local.String()
		}
		out = append(out, text)
	}
	if len(out) == 0 {
		return "none: rejected"
	}
	return strings.Join(out, ", ")
}

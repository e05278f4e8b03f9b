// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

// applyFlags are the flags of weir apply.
type applyFlags struct {
	file        string
	dry         bool
	more        []cli.Extension
	allowOutage bool
	confirm     confirmFlag
}

func applyCommand(g *cli.Globals) *cobra.Command {
	var f applyFlags
	c := &cobra.Command{
		Use: "apply -f FILE", Short: "Make the host match a configuration file", Args: cobra.NoArgs,
		Long: `Make the host match a configuration file. Objects missing from the file are
removed, and matching objects stay as they are: applying a file twice changes
nothing. A file with an error changes nothing. --dry-run prints the plan.

A change that would take traffic from its receiver is rejected, with each slot
left empty and the reason. --allow-outage makes the change all the same.

With --confirm, the change is rolled back after the given time unless weir confirm
keeps it. This holds also if this command, its shell or weir serve dies. The
rollback restores configuration, seeds, device assignments, members' slots and
templates. Counters of removed objects restart at 0. weir rollback rolls back at
once. Until then weir apply without --confirm is rejected, and with --confirm it
restarts the time for both changes. The file itself does not change: keep the
previous file for the next boot.

A change may assign routers to other slots. Their TCP sessions move along if their
members hand over sessions (see weir handoff). Other sessions are reset one by one
and printed. The configuration is in force from the start. If this command is
killed meanwhile, a running weir serve continues the resets.`,
		Example: `  weir apply -f weir.yaml --dry-run     # the plan, and the routers to be reset
  weir apply -f weir.yaml --confirm 5m  # check the result, then: weir confirm
  weir apply -f weir.yaml --rate 20/s`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := host.LoadConfig(f.file)
			if err != nil {
				return err
			}
			cfg.AllowOutage, cfg.Confirm = f.allowOutage, time.Duration(f.confirm)
			for _, x := range f.more {
				x.Prepare(cfg)
			}
			if f.dry {
				return f.printWould(cmd, g, cfg)
			}
			return f.apply(cmd, g, cfg)
		},
	}
	c.Flags().StringVarP(&f.file, "file", "f", "", "configuration file (- for standard input)")
	f.more = extensions(g)
	for _, x := range f.more {
		x.AddFlags(c)
	}
	c.Flags().BoolVar(&f.dry, "dry-run", false, "print the plan, and the routers whose sessions would be reset; change nothing")
	c.Flags().Var(&f.confirm, "confirm", "roll the change back after this time, like 5m, unless weir confirm keeps it")
	c.Flags().Lookup("confirm").DefValue = ""
	c.Flags().BoolVar(&f.allowOutage, "allow-outage", false, "make the change even if it takes traffic from its receiver")
	c.MarkFlagFilename("file", "yaml", "yml")
	c.PreRunE = func(*cobra.Command, []string) error {
		if f.file == "" {
			return cli.Usage(fmt.Errorf("name the configuration file: weir apply -f weir.yaml"))
		}
		return nil
	}
	return cut{rollsBack: true, remedy: "run weir apply again to finish it, or apply the previous file"}.of(c)
}

// printWould prints the plan and its consequences.
func (f *applyFlags) printWould(cmd *cobra.Command, g *cli.Globals, cfg *host.Config) error {
	plan, err := g.Host().Plan(cmd.Context(), cfg)
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	for _, s := range plan.Steps {
		note := ""
		if s.Foresee != nil {
			note = s.Foresee(cmd.Context())
		}
		if note != "" {
			note = " (" + note + ")"
		}
		fmt.Fprintln(out, "would", s.String()+note)
	}
	if len(plan.Steps) == 0 {
		fmt.Fprintln(out, "nothing to change")
	}
	warn(cmd, plan.Warnings...)
	printOutages(cmd, plan)
	for _, x := range f.more {
		x.Foresee(cmd, cfg)
	}
	return nil
}

// apply makes the host match the file and prints each step.
func (f *applyFlags) apply(cmd *cobra.Command, g *cli.Globals, cfg *host.Config) error {
	out, steps, told := cmd.OutOrStdout(), 0, map[string]bool{}
	cfg.Warned = func(w string) {
		told[w] = true
		warn(cmd, w)
	}
	change := func() error {
		err := g.Host().Apply(cmd.Context(), cfg, func(d host.Done) {
			steps++
			printDone(cmd, d)
		})
		if err != nil {
			return err
		}
		if steps == 0 {
			fmt.Fprintln(out, "nothing to change")
		}
		if plan, err := g.Host().Plan(cmd.Context(), cfg); err == nil {
			warn(cmd, slices.DeleteFunc(plan.Warnings, func(w string) bool { return told[w] })...)
		}
		if u, err := g.Host().Unconfirmed(); err == nil && u.Waits() {
			fmt.Fprintf(out, "unconfirmed: rolled back at %s, in %s, unless weir confirm keeps it\n", moment(time.Now().Add(u.Left), time.Now()), u.Left.Round(time.Second))
		}
		return nil
	}
	for _, x := range slices.Backward(f.more) {
		inner := change
		change = func() error { return x.Around(cmd, cfg, inner) }
	}
	return change()
}

// warn prints warnings, for example of an override that differs from the file.
func warn(cmd *cobra.Command, warnings ...string) {
	for _, w := range warnings {
		fmt.Fprintln(cmd.ErrOrStderr(), "warning:", w)
	}
}

func removeCommand(g *cli.Globals) *cobra.Command {
	var allowOutage bool
	c := &cobra.Command{
		Use: "remove [FEATURE]", Short: "Remove weir's pins and programs; the kernel alone decides then", Args: cobra.MaximumNArgs(1),
		Long: `Remove weir's pins and programs, of one feature or of all. From then on the kernel
alone decides.

If a removal would take served traffic away, nothing is removed, and each case is
named. --allow-outage removes all the same. The cases are a rerouted link, a member
reached only by steering, a load balancer and a backend.`,
		ValidArgs: host.Features(),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) > 0 {
				name = args[0]
				if err := host.CheckOnly(args); err != nil {
					return cli.Usage(err)
				}
			}
			return g.Host().Remove(cmd.Context(), name, allowOutage)
		},
	}
	c.Flags().BoolVar(&allowOutage, "allow-outage", false, "remove even if it takes served traffic away")
	return cut{remedy: host.RemoveRemedy}.of(c)
}

// printOutages prints the traffic lost by a change.
func printOutages(cmd *cobra.Command, plan feature.Plan) {
	for _, o := range plan.Outages {
		fmt.Fprintln(cmd.ErrOrStderr(), "outage:", o)
	}
}

// locked runs f while holding the write lock.
func locked(cmd *cobra.Command, g *cli.Globals, f func(l *kernel.WriteLock) error) error {
	l, err := g.Host().Root.Lock(cmd.Context())
	if err != nil {
		return err
	}
	defer l.Unlock()
	return f(l)
}

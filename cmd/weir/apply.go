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
		Long: `Make the host match a configuration file. What is there and not in the file is
removed; what matches is left alone, so applying a file twice changes nothing.
A file with an error changes nothing. --dry-run prints the plan.

A change that takes traffic away from its receiver is refused, with each slot that it
would empty and the reason, unless --allow-outage is given. --dry-run tells the same.

With --confirm the change is taken back when that time is over, unless weir confirm comes
before: also if this command, its shell or weir serve die meanwhile. What is taken back
is all that the change did: configuration, seeds, where devices go, members' slots and
templates; counters of what it had removed begin anew. weir rollback does so at once. Until
then an apply without --confirm is refused; one with it begins the time anew, and what is
taken back are both. The file is not changed: keep the former one where your boot finds it.

Where a change gives routers to other slots, their TCP sessions at the former
ones go along if their members hand over (see weir handoff), else they are reset,
one by one, and announced; the configuration is in force from the start. Killed
meanwhile, a running weir serve goes on.`,
		Example: `  weir apply -f weir.yaml --dry-run     # the plan, and the routers whose sessions would be reset
  weir apply -f weir.yaml --confirm 5m  # then look, and: weir confirm
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
	c.Flags().Var(&f.confirm, "confirm", "take the change back after this time, like 5m, unless weir confirm comes before")
	c.Flags().Lookup("confirm").DefValue = ""
	c.Flags().BoolVar(&f.allowOutage, "allow-outage", false, "make the change even if it takes traffic from its receiver")
	c.MarkFlagFilename("file", "yaml", "yml")
	c.PreRunE = func(*cobra.Command, []string) error {
		if f.file == "" {
			return cli.Usage(fmt.Errorf("name the configuration file: weir apply -f weir.yaml"))
		}
		return nil
	}
	return cut{rollsBack: true, remedy: "weir apply again goes on from there, or apply the former file"}.of(c)
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
			fmt.Fprintf(out, "unconfirmed: taken back at %s, in %s, unless weir confirm comes first\n", moment(time.Now().Add(u.Left), time.Now()), u.Left.Round(time.Second))
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
		Use: "remove [FEATURE]", Short: "Take weir's pins and programs away: the kernel's own behaviour at once", Args: cobra.MaximumNArgs(1),
		Long: `Take weir's pins and programs away, of one feature or of all. From then on the kernel
alone decides.

Where that takes traffic away that is served now, nothing is removed and each case is
named: a link that is down and whose packets are rerouted, a member that only weir's
steering reaches, a load balancer, a backend of one. --allow-outage removes all the same.`,
		ValidArgs: host.Features(),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) > 0 {
				name = args[0]
			}
			return g.Host().Remove(cmd.Context(), name, allowOutage)
		},
	}
	c.Flags().BoolVar(&allowOutage, "allow-outage", false, "remove also what takes traffic away that is served now")
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

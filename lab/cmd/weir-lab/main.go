// SPDX-License-Identifier: Apache-2.0

// Command weir-lab runs the experiments of lab/. Each reproduces a claim of weir on real software, in its
// own network namespaces.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/compare"
	"github.com/weir-project/weir/lab/delay"
	"github.com/weir-project/weir/lab/demo"
	"github.com/weir-project/weir/lab/dispatch"
	_ "github.com/weir-project/weir/lab/filter"
	_ "github.com/weir-project/weir/lab/guard"
	handofflab "github.com/weir-project/weir/lab/handoff"
	_ "github.com/weir-project/weir/lab/handoffcompare"
	"github.com/weir-project/weir/lab/handoffpair"
	"github.com/weir-project/weir/lab/loaders"
	"github.com/weir-project/weir/lab/onehost"
	"github.com/weir-project/weir/lab/peers"
	_ "github.com/weir-project/weir/lab/reload"
	_ "github.com/weir-project/weir/lab/reroute"
	_ "github.com/weir-project/weir/lab/reroutecost"
	"github.com/weir-project/weir/lab/reroutestress"
	_ "github.com/weir-project/weir/lab/table"
	_ "github.com/weir-project/weir/lab/telemetry"
	_ "github.com/weir-project/weir/lab/tilfa"
)

// Exit statuses, equal to weir's.
const (
	exitFailed = 1
	exitUsage  = 2
	exitCannot = 3 // not possible on this kernel or as this user
)

// errClaims is the error of a run with failed claims. The claims are already printed.
var errClaims = errors.New("some claims do not hold")

// cannot marks an error of the user or the machine, not of weir.
type cannot struct{ error }

func (c cannot) Unwrap() error { return c.error }

// usage marks an error of the command line.
type usage struct{ error }

func (u usage) Unwrap() error { return u.error }

func main() {
	lab.Enter()  // each of these calls turns a child process into its role, and does not return in it
	peers.Sink() // built-in collector
	compare.Sink()
	dispatch.Hold()
	delay.Play()      // carrier of a delay line
	onehost.Play()    // member of a service
	handofflab.Play() // mover of sessions
	handoffpair.Play()
	reroutestress.Play()
	loaders.Play() // foreign loader of BPF programs
	demo.Play()    // server of sessions
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	err := newCommand().ExecuteContext(ctx)
	if err != nil && !errors.Is(err, errClaims) {
		fmt.Fprintln(os.Stderr, "weir-lab:", err)
	}
	os.Exit(exitStatus(err))
}

func exitStatus(err error) int {
	var c cannot
	var u usage
	switch {
	case err == nil:
		return 0
	case errors.As(err, &u):
		return exitUsage
	case errors.As(err, &c):
		return exitCannot
	}
	return exitFailed
}

func newCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "weir-lab",
		Short: "Run the experiments behind weir's claims",
		Long: `Run experiments on real software. An experiment creates network namespaces, starts
real daemons in them, measures, and evaluates claims about weir. It then removes all
of its objects, also after Ctrl-C. Each run has its own pins and never touches a weir
in use.`,
		Example: `  sudo weir-lab demo steer
  sudo weir-lab run telemetry --quick`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usage{fmt.Errorf("unknown command %q; see weir-lab --help", args[0])}
			}
			return nil
		},
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage{err} })
	c.AddCommand(listCommand(), runCommand(), demoCommand(), resultsCommand())
	return c
}

func listCommand() *cobra.Command {
	var names bool
	c := &cobra.Command{
		Use: "list", Short: "List the experiments",
		Args: func(cmd *cobra.Command, args []string) error { return wrong(cobra.NoArgs(cmd, args)) },
		RunE: func(cmd *cobra.Command, _ []string) error {
			width := 0
			for _, x := range lab.Experiments() {
				width = max(width, len(x.Name))
			}
			for _, x := range lab.Experiments() {
				if names {
					fmt.Fprintln(cmd.OutOrStdout(), x.Name)
				} else {
					fmt.Fprintf(cmd.OutOrStdout(), "%-*s  %s\n", width, x.Name, x.Short)
				}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&names, "names", false, "print only the names, one a line")
	return c
}

func wrong(err error) error {
	if err != nil {
		return usage{err}
	}
	return nil
}

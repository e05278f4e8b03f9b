// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/spf13/cobra"

	"github.com/weir-project/weir/internal/terminal"
	"github.com/weir-project/weir/lab"
)

// runFlags are the flags of `weir-lab run`.
type runFlags struct {
	quick, smoke, json, strict, without bool
	seed                                uint64
	keep                                string
}

func runCommand() *cobra.Command {
	var f runFlags
	c := &cobra.Command{
		Use: "run NAME", Short: "Run an experiment",
		Long: `Run an experiment and evaluate its claims.

Exit status:
  0  all claims hold, or only performance claims failed
  1  a correctness claim failed; with --strict, any claim
  2  wrong usage
  3  this machine or user cannot run the experiment

A busy machine can fail a performance claim without a fault of weir.`,
		Example: `  sudo weir-lab run telemetry --quick
  sudo weir-lab run table --smoke --json
  sudo weir-lab run telemetry --without-weir`,
		Args: func(cmd *cobra.Command, args []string) error { return wrong(cobra.ExactArgs(1)(cmd, args)) },
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			var names []string
			for _, x := range lab.Experiments() {
				names = append(names, x.Name)
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			x, err := lab.Lookup(args[0])
			if err != nil {
				return usage{err}
			}
			if f.quick && f.smoke {
				return usage{errors.New("--quick and --smoke exclude each other: choose one")}
			}
			if !cmd.Flags().Changed("seed") {
				f.seed = uint64(rand.Uint32())
			}
			return run(cmd.Context(), x, f)
		},
	}
	c.Flags().BoolVar(&f.quick, "quick", false, "end within 60 s")
	c.Flags().BoolVar(&f.smoke, "smoke", false, "correctness claims only, end within 30 s")
	c.Flags().BoolVar(&f.json, "json", false, "print one JSON object to stdout and nothing else; log to stderr")
	c.Flags().BoolVar(&f.strict, "strict", false, "exit with 1 also for a failed performance claim")
	c.Flags().Uint64Var(&f.seed, "seed", 0, "seed of all random draws, weir's hash included (default: a new one each time)")
	c.Flags().BoolVar(&f.without, "without-weir", false, "control run: the same without weir; its claims should fail")
	c.Flags().StringVar(&f.keep, "keep", "", "keep logs and output of every process in this new directory")
	return c
}

func (f runFlags) size() lab.Size {
	switch {
	case f.smoke:
		return lab.Smoke
	case f.quick:
		return lab.Quick
	}
	return lab.Full
}

func run(ctx context.Context, x lab.Experiment, f runFlags) error {
	if os.Geteuid() != 0 {
		return cannot{errors.New("network namespaces and BPF programs need root: run it with sudo")}
	}
	o := lab.Options{Size: f.size(), Seed: f.seed, Control: f.without, Keep: f.keep}
	done := func() {}
	if !f.json && terminal.Is(os.Stdout) {
		t := lab.NewTerminal(os.Stdout, fmt.Sprintf("weir-lab run %s (%s, seed %d)", x.Name, o.Size, o.Seed), lab.SizeOf(os.Stdout))
		o.Watch, done = t, t.Close
	} else {
		o.Watch = &lab.Log{W: os.Stderr, Since: time.Now()}
	}
	begin := time.Now()
	r, err := lab.Execute(ctx, x, o)
	done()
	r.Set("seconds", time.Since(begin).Seconds())
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted; cleanup done (%g left over)", r.Metrics[lab.LeftoversMetric])
	}
	if err != nil {
		if impossible(err) {
			err = cannot{err}
		}
		if f.json {
			_ = printJSON(os.Stdout, r) // the JSON also lists skipped parts and notes
		} else {
			printNotes(os.Stderr, r)
		}
		return err
	}
	if f.json {
		err = printJSON(os.Stdout, r)
	} else {
		var b strings.Builder
		printResult(&b, r, x)
		_, err = io.WriteString(os.Stdout, terminal.Wrap(os.Stdout, b.String(), "         "))
	}
	if err == nil && r.Failed(f.strict) {
		return errClaims
	}
	return err
}

// impossible reports whether this machine cannot run the experiment: a program or a kernel feature is
// missing, or weir exited with exitCannot.
func impossible(err error) bool {
	var status *exec.ExitError
	return errors.Is(err, exec.ErrNotFound) || errors.Is(err, ebpf.ErrNotSupported) || errors.As(err, &status) && status.ExitCode() == exitCannot
}

func printJSON(w io.Writer, r *lab.Result) error {
	return json.NewEncoder(w).Encode(r)
}

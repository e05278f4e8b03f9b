// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/units"
)

// maxConfirm is the longest accepted --confirm time. A process waits that long.
const maxConfirm = 30 * 24 * time.Hour

// moment formats t as a time of day, with the date if from is more than 24 hours away.
func moment(t time.Time, from time.Time) string {
	if d := t.Sub(from); d > 24*time.Hour || d < -24*time.Hour {
		return t.Format(time.DateTime)
	}
	return t.Format(time.TimeOnly)
}

// confirmFlag is the value of --confirm, from 1 s to maxConfirm.
type confirmFlag time.Duration

func (f *confirmFlag) String() string { return time.Duration(*f).String() }
func (f *confirmFlag) Type() string   { return "duration" }

func (f *confirmFlag) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Second || d > maxConfirm {
		return fmt.Errorf("want a time from 1s to 720h, like 90s or 5m")
	}
	*f = confirmFlag(d)
	return nil
}

func confirmCommand(g *cli.Globals) *cobra.Command {
	var watch string
	c := &cobra.Command{
		Use: "confirm", Short: "Keep the change made by weir apply --confirm", Args: cobra.NoArgs,
		Long: `Keep the change made by weir apply --confirm. Without it, the change is rolled
back after its time. weir status shows the time left.`,
		Example: `  weir apply -f weir.yaml --confirm 5m
  weir confirm`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if watch == "" {
				return g.Host().Confirm(cmd.Context())
			}
			leaveCgroup()
			err := g.Host().Watch(cmd.Context(), watch, func() { fmt.Fprintln(cmd.OutOrStdout(), "watching") })
			if err != nil {
				return err
			}
			return resetDue(quiet(cmd), g, nil) // sessions misplaced by the rollback
		},
	}
	c.Flags().StringVar(&watch, "watch", "", "roll a change back after its time (started by weir apply --confirm)")
	c.Flags().MarkHidden("watch")
	return c
}

// quiet returns a command without output, because the terminal is gone by then.
func quiet(cmd *cobra.Command) *cobra.Command {
	c := &cobra.Command{}
	c.SetContext(cmd.Context())
	c.SetOut(nothing{})
	return c
}

type nothing struct{}

func (nothing) Write(b []byte) (int, error) { return len(b), nil }

// leaveCgroup moves this process to the root of cgroup2. There it survives the end of its session or unit: systemd
// kills the processes of both. If the move fails, weir serve rolls the change back.
func leaveCgroup() {
	if root, err := units.CgroupRoot(); err == nil {
		_ = os.WriteFile(filepath.Join(root, "cgroup.procs"), []byte("0"), 0)
	}
}

func rollbackCommand(g *cli.Globals) *cobra.Command {
	return cut{remedy: "the change is rolled back in part: " + host.RollbackRemedy}.of(&cobra.Command{
		Use: "rollback", Short: "Roll back the change made by weir apply --confirm at once", Args: cobra.NoArgs,
		Long: `Roll back the change made by weir apply --confirm at once. The same happens by
itself after its time. A confirmed change, or one made without --confirm, stays:
apply the previous file.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := g.Host().Rollback(cmd.Context(), func(d host.Done) { printDone(cmd, d) }); err != nil {
				return err
			}
			return resetDue(cmd, g, nil)
		},
	})
}

func printDone(cmd *cobra.Command, d host.Done) {
	fmt.Fprint(cmd.OutOrStdout(), fmt.OneLine(d.Step.String())) // a saved state may have any names
	if d.Note != "" {
		fmt.Fprintf(cmd.OutOrStdout(), " (%s)", d.Note)
	}
	fmt.Fprintln(cmd.OutOrStdout())
}

func init() {
	host.WatchCommand = func(root, id string) *exec.Cmd {
		self, err := os.Executable()
		if err != nil {
			self = os.Args[0]
		}
		return exec.Command(self, "confirm", "--root", root, "--watch", id)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/host"
)

func statusCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Show services, guards, filters, paths, load balancers and sessions", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := g.Reader().Status(cmd.Context())
			if err != nil {
				return err
			}
			if g.JSON {
				return errors.Join(cli.PrintJSON(cmd, st), st.Err())
			}
			printStatus(cmd.OutOrStdout(), st, time.Now())
			return st.Err()
		},
	}
	cli.JSONFlag(c, g)
	return c
}

func printStatus(w io.Writer, st host.Status, now time.Time) {
	cli.PrintFaults(w, st.Faults, "")
	if st.Unconfirmed != nil {
		f := st.Unconfirmed.Finding()
		cli.Note(w, "! %s: %s: %s\n", f.Object, f.Text, f.Remedy)
	}
	if st.HalfDone != nil {
		f := st.HalfDone.Finding()
		cli.Note(w, "! %s: %s: %s\n", f.Object, f.Text, f.Remedy)
	}
	printSummaries(w, st, now)
}

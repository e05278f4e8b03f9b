// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

func statusCommand(g *globals) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Show what is there: services, slots, members, guards, filters", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := g.reader().Status(cmd.Context())
			if err != nil {
				return err
			}
			if g.json {
				return errors.Join(printJSON(cmd, st), st.Err())
			}
			printStatus(cmd.OutOrStdout(), st, time.Now())
			return st.Err()
		},
	}
	jsonFlag(c, g)
	return c
}

// tellFaults shows a feature's faults before its status.
func tellFaults(cmd *cobra.Command, g *globals, feature string) {
	if faults, err := g.reader().Faults(cmd.Context()); err == nil {
		printFaults(cmd.OutOrStdout(), faults, feature)
	}
}

// printFaults shows damage and programs of others: those of a feature, or all if it is empty.
func printFaults(w io.Writer, faults []kernel.Fault, feature string) {
	for _, f := range faults {
		if feature == "" || f.Feature == feature || f.Feature == "" {
			fmt.Fprintf(w, "! %s: %s\n", f, f.Remedy)
		}
	}
}

func printStatus(w io.Writer, st host.Status, now time.Time) {
	printFaults(w, st.Faults, "")
	if st.Unconfirmed != nil {
		f := st.Unconfirmed.Finding()
		fmt.Fprintf(w, "! %s: %s: %s\n", f.Object, f.Text, f.Remedy)
	}
	printSummaries(w, st, now)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

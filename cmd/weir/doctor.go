// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

func doctorCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "doctor", Short: "Report which features this kernel and user can run, and why not", Args: cobra.NoArgs,
		Long: `Probe whether this kernel and user can run each feature, and check running
services for common faults, such as a proxy hiding the routers' addresses. A
failure is a broken part of the configuration: /healthz of weir serve then answers
503 with it. The exit status is 3 if a feature cannot run.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d := g.Host().Doctor(cmd.Context())
			if g.JSON {
				if err := cli.PrintJSON(cmd, d); err != nil {
					return err
				}
				return d.Able()
			}
			printDoctor(cmd.OutOrStdout(), d)
			return d.Able()
		},
	}
	cli.JSONFlag(c, g)
	return c
}

func printDoctor(w io.Writer, d host.Diagnosis) {
	fmt.Fprintf(w, "Linux %s, as %s\n", d.Kernel, d.User)
	type row struct {
		Feature string `table:"FEATURE"`
		Needs   string `table:"NEEDS"`
		Since   string `table:"SINCE,dash"`
		Level   string `table:"STATE"`
	}
	var rows []row
	for _, f := range d.Findings {
		if f.Level != "warning" && f.Level != "failure" {
			rows = append(rows, row{f.Feature, f.Check, f.Since, f.Level})
		}
	}
	cli.PrintRows(w, rows, time.Time{})
	for _, f := range d.Findings {
		if f.Text == "" {
			continue
		}
		about := f.Feature + " " + f.Check
		if strings.HasPrefix(f.Check, f.Feature+" ") || strings.HasPrefix(f.Check, "load balancer ") { // for example "backend s1", "load balancer edge"
			about = f.Check
		}
		cli.Note(w, "%s: %s: %s\n", f.Level, about, f.Text)
		if f.For != "" {
			cli.Note(w, "  for: %s\n", f.For)
		}
		if f.Remedy != "" {
			cli.Note(w, "  remedy: %s\n", f.Remedy)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/host"
)

func applyCommand(g *globals) *cobra.Command {
	var file string
	var dry bool
	c := &cobra.Command{
		Use: "apply -f FILE", Short: "Make the host match a configuration file", Args: cobra.NoArgs,
		Long: `Make the host match a configuration file. What is there and not in the file is
removed; what matches is left alone, so applying a file twice changes nothing.
A file with an error changes nothing. --dry-run prints the plan.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := host.LoadConfig(file)
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if dry {
				plan, err := g.host().Plan(cmd.Context(), cfg)
				if err != nil {
					return err
				}
				for _, s := range plan.Steps {
					fmt.Fprintln(out, "would", s)
				}
				if len(plan.Steps) == 0 {
					fmt.Fprintln(out, "nothing to change")
				}
				return nil
			}
			steps := 0
			err = g.host().Apply(cmd.Context(), cfg, func(d host.Done) {
				steps++
				fmt.Fprint(out, d.Step)
				if d.Note != "" {
					fmt.Fprintf(out, " (%s)", d.Note)
				}
				fmt.Fprintln(out)
			})
			if err == nil && steps == 0 {
				fmt.Fprintln(out, "nothing to change")
			}
			return err
		},
	}
	c.Flags().StringVarP(&file, "file", "f", "", "configuration file")
	c.Flags().BoolVar(&dry, "dry-run", false, "print the plan, change nothing")
	c.MarkFlagFilename("file", "yaml", "yml")
	c.PreRunE = func(*cobra.Command, []string) error {
		if file == "" {
			return usageError{fmt.Errorf("name the configuration file: weir apply -f weir.yaml")}
		}
		return nil
	}
	return c
}

func removeCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "remove [FEATURE]", Short: "Take weir's pins and programs away: the kernel's own behaviour at once", Args: cobra.MaximumNArgs(1),
		ValidArgs: []string{"steer"},
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) > 0 {
				name = args[0]
			}
			return g.host().Remove(cmd.Context(), name)
		},
	}
}

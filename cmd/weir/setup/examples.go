// SPDX-License-Identifier: Apache-2.0

// Package setup has the commands before the first weir apply.
package setup

import (
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/examples"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/suggest"
)

// Examples returns weir examples.
func Examples() *cobra.Command {
	return &cobra.Command{
		Use: "examples [NAME]", Short: "List example configurations, or print one", Args: cobra.MaximumNArgs(1),
		Example: `  weir examples
  weir examples telemetry > weir.yaml
  weir apply -f weir.yaml --dry-run`,
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) (out []cobra.Completion, _ cobra.ShellCompDirective) {
			for _, e := range examples.All() {
				if len(args) == 0 {
					out = append(out, cobra.CompletionWithDesc(e.Name, e.About))
				}
			}
			return out, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			all := examples.All()
			if len(args) == 0 {
				printExamples(cmd.OutOrStdout(), all)
				return nil
			}
			at := slices.IndexFunc(all, func(e examples.Example) bool { return e.Name == args[0] })
			if at < 0 {
				return cli.Usage(unknownExample(args[0], all))
			}
			_, err := io.WriteString(cmd.OutOrStdout(), all[at].Text)
			return err
		},
	}
}

func unknownExample(name string, all []examples.Example) error {
	var names []string
	for _, e := range all {
		names = append(names, e.Name)
	}
	if near := suggest.Nearest(name, names); near != "" {
		return fmt.Errorf("no example %q; did you mean %q?", name, near)
	}
	return fmt.Errorf("no example %q: want one of %s", name, strings.Join(names, ", "))
}

func printExamples(w io.Writer, all []examples.Example) {
	type row struct {
		Name  string `table:"NAME"`
		About string `table:"CONFIGURES"`
	}
	var rows []row
	for _, e := range all {
		rows = append(rows, row{e.Name, e.About})
	}
	cli.PrintRows(w, rows, time.Time{})
}

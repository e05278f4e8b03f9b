// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

// plainFeature returns the default command file: weir NAME status prints the feature's state as tables.
func plainFeature(name string) Feature {
	return Feature{
		Name:     name,
		Overview: []string{cmp.Or("weir "+name+" status") + "|applied state and counters of " + name},
		Commands: func(g *Globals) []*cobra.Command {
			c := &cobra.Command{Use: name, Short: "Show " + name}
			c.AddCommand(plainStatus(g, name))
			return []*cobra.Command{c}
		},
		Summary: func(w io.Writer, st host.Status, _ bool, now time.Time) {
			if part := st.Part(name); part != nil {
				PrintTables(w, part, now)
			}
		},
	}
}

func plainStatus(g *Globals, name string) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Show the applied state and counters of " + name, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := g.Reader().Status(cmd.Context())
			if err != nil {
				return err
			}
			part := st.Part(name)
			if g.JSON {
				return PrintJSON(cmd, part)
			}
			PrintFaults(cmd.OutOrStdout(), st.Faults, name)
			if part == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "no state of %s: weir apply -f weir.yaml creates it from its section\n", name)
				return nil
			}
			PrintTables(cmd.OutOrStdout(), part, time.Now())
			return nil
		},
	}
	JSONFlag(c, g)
	return c
}

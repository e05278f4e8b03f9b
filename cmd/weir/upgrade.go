// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

func upgradeCommand(g *cli.Globals) *cobra.Command {
	var dry bool
	c := &cobra.Command{
		Use: "upgrade", Short: "Put this weir's programs in place of another version's, under traffic", Args: cobra.NoArgs,
		Long: `Put this weir's programs in place of those that another version left in the kernel.
No packet is lost: each meets the old program or the new one, and both use the same
maps. What is there keeps its counts. Pins of another ABI are refused, with the
remedy. weir apply does the same as part of its plan. Restart weir serve
afterwards.`,
		Example: `  weir upgrade --dry-run      # what would change
  weir upgrade && systemctl restart weir`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			steps := 0
			var err error
			if dry {
				plan, perr := g.Host().UpgradePlan(cmd.Context())
				for _, s := range plan.Steps {
					steps++
					fmt.Fprintln(out, "would", s)
				}
				err = perr
			} else {
				err = g.Host().Upgrade(cmd.Context(), func(d host.Done) {
					steps++
					fmt.Fprintln(out, d.Step)
				})
			}
			if err == nil && steps == 0 {
				fmt.Fprintln(out, "nothing to upgrade: what is in the kernel is this weir's")
			}
			return err
		},
	}
	c.Flags().BoolVar(&dry, "dry-run", false, "print the plan, change nothing")
	return c
}

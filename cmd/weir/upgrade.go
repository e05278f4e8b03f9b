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
		Use: "upgrade", Short: "Replace another version's programs by this one's, under traffic", Args: cobra.NoArgs,
		Long: `Replace the programs of another weir version in the kernel with the ones of this
version. No packet is lost: each packet meets the old program or the new one, and
both use the same maps. Counters stay. Pins with another ABI are rejected with the
remedy. weir apply upgrades as part of its plan. Restart weir serve afterwards.`,
		Example: `  weir upgrade --dry-run      # print the plan
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
				fmt.Fprintln(out, "nothing to upgrade: the programs in the kernel are of this version")
			}
			return err
		},
	}
	c.Flags().BoolVar(&dry, "dry-run", false, "print the plan, change nothing")
	return c
}

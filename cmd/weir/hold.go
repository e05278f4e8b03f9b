// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/feature/steer"
)

// steerHold is the process that on_empty: drop needs; apply starts it.
func steerHold(g *globals) *cobra.Command {
	var scope string
	c := &cobra.Command{
		Use: "hold", Short: "Hold the sockets that swallow packets for on_empty: drop", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if scope == "" {
				return usageError{fmt.Errorf("name the namespace: --scope INODE")}
			}
			return steer.Hold(cmd.Context(), g.host().Root, scope)
		},
	}
	c.Flags().StringVar(&scope, "scope", "", "inode number of the network namespace")
	return c
}

func init() {
	steer.HolderCommand = func(root, scope string) *exec.Cmd {
		self, err := os.Executable()
		if err != nil {
			self = os.Args[0]
		}
		return exec.Command(self, "steer", "hold", "--root", root, "--scope", scope)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/sockholder"
	"github.com/weir-project/weir/feature/steer/spec"
	fmt "github.com/weir-project/weir/internal/printable"
)

// steerHold returns the hidden command of the socket holder. weir apply starts it.
func steerHold(g *cli.Globals) *cobra.Command {
	var scope string
	var engine string
	c := &cobra.Command{
		Use: "hold", Short: "Hold weir's own sockets: sinks of on_empty: drop, and one a reuseport group", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if scope == "" {
				return cli.Usage(fmt.Errorf("name the namespace: --scope INODE"))
			}
			return sockholder.Run(cmd.Context(), g.Host().Root, scope, spec.Engine(engine))
		},
	}
	c.Flags().StringVar(&engine, "engine", string(spec.EngineSkLookup), "engine of the sockets")
	c.Flags().StringVar(&scope, "scope", "", "inode number of the network namespace")
	return c
}

func init() {
	engine.SocketHolderCommand = func(root, scope string, kind spec.Engine) *exec.Cmd {
		self, err := os.Executable()
		if err != nil {
			self = os.Args[0]
		}
		return exec.Command(self, "steer", "hold", "--root", root, "--scope", scope, "--engine", string(kind))
	}
}

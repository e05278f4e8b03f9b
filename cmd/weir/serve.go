// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/host"
)

func serveCommand(g *globals) *cobra.Command {
	var listen string
	c := &cobra.Command{
		Use: "serve", Short: "Give slots to members as they start; serve metrics and the group's socket", Args: cobra.NoArgs,
		Long: `Give slots to members the moment their sockets appear, send them the templates
of flow exporters that they lack, and serve /metrics and /healthz over HTTP and
the reading commands over a Unix socket.

Traffic does not need it: it may be stopped, restarted or killed at any time, and
a slot whose member dies is withdrawn by the kernel alone. Only members that
start meanwhile wait for its return, or for weir steer register.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log := slog.New(slog.NewTextHandler(os.Stderr, nil))
			return g.host().Serve(cmd.Context(), host.ServeOptions{Listen: listen, Socket: g.socket, Log: log})
		},
	}
	c.Flags().StringVar(&listen, "listen", "127.0.0.1:9743", "address of /metrics and /healthz; empty for none")
	return c
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/host"
	selfregister "github.com/weir-project/weir/register"
)

// ignoreHangup says that SIGHUP changes nothing, instead of ending by it.
func ignoreHangup(ctx context.Context, log *slog.Logger, instead string) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGHUP)
	go func() {
		defer signal.Stop(c)
		for {
			select {
			case <-ctx.Done():
				return
			case <-c:
				log.Info("SIGHUP ignored", "instead", instead)
			}
		}
	}()
}

func serveCommand(g *globals) *cobra.Command {
	var listen, register, handoff string
	c := &cobra.Command{
		Use: "serve", Short: "Give slots to members as they start; serve metrics and the group's socket", Args: cobra.NoArgs,
		Long: `Give slots to members the moment their sockets appear, send them the templates
of flow exporters that they lack, copy datagrams of devices that come later, attach
filters to interfaces that come later, log which links and BFD sessions the kernel finds down and up,
and serve /metrics and /healthz over HTTP and the reading commands over a Unix socket
(--socket), to root and the group. Over another (--register-socket), to which everybody may connect and which answers
nothing else, collectors register themselves, with the Go package register or
include/weir.h. Over a third one (--handoff-socket) members of services keep their live sessions here, so that
these outlive them: see weir handoff.

Traffic does not need it: it may be stopped, restarted or killed at any time, and
a slot whose member dies is withdrawn by the kernel alone. Only members that
start meanwhile wait for its return, or for weir steer register; and the BFD sessions
that FRR's bfdd hands over (frr:) end with it, unless systemd restarts it.

It keeps the capabilities that its features need, and drops all others, also for
checks of members that it starts (ready.command).

SIGHUP is ignored: weir serve has no file of its own to read again. weir apply changes
what it works by, and it follows.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("register-socket") && g.socket != "" {
				register = filepath.Join(filepath.Dir(g.socket), filepath.Base(register))
			}
			if !cmd.Flags().Changed("handoff-socket") && g.socket != "" {
				handoff = filepath.Join(filepath.Dir(g.socket), filepath.Base(handoff))
			}
			log := newLog(os.Stderr)
			if err := host.DropRights(); err != nil {
				log.Warn("capabilities that serve does not need stay", "err", err)
			}
			ignoreHangup(cmd.Context(), log, "weir apply changes what weir serve works by")
			return g.host().Serve(cmd.Context(), host.ServeOptions{Listen: listen, Socket: g.socket, Register: register, Handoff: handoff, Log: log})
		},
	}
	c.Flags().StringVar(&listen, "listen", "127.0.0.1:9743", "address of /metrics and /healthz; empty for none")
	c.Flags().StringVar(&register, "register-socket", selfregister.DefaultSocket, "socket for collectors that register themselves, by default beside --socket; empty for none")
	c.Flags().StringVar(&handoff, "handoff-socket", wire.DefaultSocket, "socket for members that hand over sessions, by default beside --socket; empty for none")
	return c
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/steer/daemon"
	fmt "github.com/weir-project/weir/internal/printable"
	"golang.org/x/sys/unix"
)

func steerRetire(g *cli.Globals) *cobra.Command {
	t := daemon.Retirement{}
	slot := -1
	var stop string
	c := &cobra.Command{
		Use: "retire SERVICE --slot N", Short: "Wait until a slot's previous generation is drained, and end it", Args: cobra.ExactArgs(1),
		Long: `Wait until the previous generation of a slot's member is drained. It then has
no known UDP peer, no TCP connection, also in the queues of its listeners and on
the way there, and no unread datagram. It gets no more traffic, and receives the
signal of --stop. The default is the graceful stop signal of known servers: QUIT for
nginx and php-fpm, USR1 for HAProxy, WINCH for httpd, INT for lighttpd. At the
deadline of the service's generations all remaining connections end. Data in its
sockets gets 2 s more.

If no generation drains, the command does nothing. weir steer run --replace
retires by itself. Use this command for members started by systemd or by hand.`,
		Example: `  weir steer retire www --slot 0
  weir steer retire www --slot 0 --keep && systemctl stop www@blue`,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if t.Signal, err = stopSignal(cmd, stop); err != nil {
				return err
			}
			if t.Slot, err = findSlot(cmd, g, args[0], slot); err != nil {
				return err
			}
			t.Log = cli.NewLog(os.Stderr)
			return t.Run(cmd.Context(), g.Host().Root)
		},
	}
	c.Flags().IntVar(&slot, "slot", -1, "number of the slot")
	c.Flags().StringVar(&stop, "stop", "", "signal to end it (default: the graceful stop signal of its program, or TERM)")
	c.Flags().BoolVar(&t.Keep, "keep", false, "only wait, do not end it")
	return c
}

// stopSignal returns the signal of --stop, or 0 if the flag is not set.
func stopSignal(c *cobra.Command, name string) (syscall.Signal, error) {
	if !c.Flags().Changed("stop") {
		return 0, nil
	}
	return parseSignal(name)
}

// parseSignal parses a signal name, with or without SIG.
func parseSignal(name string) (syscall.Signal, error) {
	sig := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG"))
	if sig == 0 {
		return 0, cli.Usage(fmt.Errorf("no signal %q: want a name like TERM, QUIT or INT", name))
	}
	return sig, nil
}

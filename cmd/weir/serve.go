// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/kernel"
)

// hangups sends on the returned channel for each SIGHUP, until ctx is done.
func hangups(ctx context.Context) <-chan struct{} {
	c, out := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(c, syscall.SIGHUP)
	go func() {
		defer signal.Stop(c)
		for {
			select {
			case <-ctx.Done():
				return
			case <-c:
			}
			select {
			case <-ctx.Done():
				return
			case out <- struct{}{}:
			}
		}
	}()
	return out
}

// ignoreHangup logs SIGHUP in place of the default action, which ends the process.
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

// logWait returns a function to log waits for the lock with the process that holds it. Waits for this process itself are
// not logged.
func logWait(log *slog.Logger) func(text string) {
	own := fmt.Sprintf("held by process %d (", os.Getpid())
	return func(text string) {
		if !strings.Contains(text, own) {
			log.Info("weir serve waits", "reason", text)
		}
	}
}

// serveFlags are the flags of weir serve.
type serveFlags struct {
	host.ServeOptions
	sockets map[string]*string // by feature
}

func serveCommand(g *cli.Globals) *cobra.Command {
	var o serveFlags
	c := &cobra.Command{
		Use: "serve", Short: "Apply a file and run what it declares; serve metrics and the group's socket", Args: cobra.NoArgs,
		Long: `Apply the configuration file (-f), and again at each SIGHUP. Run what it declares: give slots
to members the moment their sockets appear, send them the templates
of flow exporters that they lack, copy datagrams of devices that come later, attach
filters to interfaces that come later, log which links and BFD sessions the kernel finds down and up,
and serve /metrics and /healthz over HTTP and the reading commands over a Unix socket
(--socket), to root and the group. Over another (--register-socket), to which everybody may connect and which answers
nothing else, collectors register themselves, with the Go package clients/go/register or
clients/c/weir.h. Over a third one (--handoff-socket) members of services keep their live sessions here, so that
these outlive them: see weir handoff.

Traffic does not need it: it may be stopped, restarted or killed at any time, and
a slot whose member dies is withdrawn by the kernel alone. Only members that
start meanwhile wait for its return, or for weir steer admit; and the BFD sessions
that FRR's bfdd hands over (frr:) end with it, unless systemd restarts it.

A file with an error changes nothing: weir serve does not start with it, and at SIGHUP
keeps running what is there. It does not start with a root on no BPF file system, nor
without the right to pin. Like weir apply, SIGHUP refuses a change that takes traffic
away from its receiver. The start allows it where nothing is applied yet, as after a boot: members may
come later. Where something is missing, weir serve tries again every 5 s, also after SIGHUP. Instances that
went with their network namespace it applies again once the namespace is back. Until then /healthz has
the reason. weir apply changes what weir serve works by as well, and goes before such an attempt.
Without -f it serves what is applied, and ignores SIGHUP.

--only runs some features alone, for privileges: the process keeps the capabilities that
these need, applies their part of the file, and listens only where flags say so. Without
--only it keeps those of all features. Checks of members that it starts (ready.command)
have no others either. --only keeper needs no right: a user who may not pin runs it by the
file alone.`,
		Example: `  weir serve -f /etc/weir/weir.yaml
  weir serve -f /etc/weir/weir.yaml --only guard,filter --listen 127.0.0.1:9744`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.resolve(cmd, g); err != nil {
				return err
			}
			o.Log = cli.NewLog(os.Stderr)
			kernel.OnWait(logWait(o.Log))
			safefile.OnWait(logWait(o.Log))
			if err := host.DropRights(o.Only); err != nil {
				o.Log.Warn("capabilities that serve does not need stay", "err", err)
			}
			if o.File == "" {
				ignoreHangup(cmd.Context(), o.Log, "weir apply changes what weir serve works by")
			} else {
				o.Reload = hangups(cmd.Context())
			}
			return g.Host().Serve(cmd.Context(), o.ServeOptions)
		},
	}
	f := c.Flags()
	f.StringVarP(&o.File, "file", "f", "", "configuration file to apply at the start and at SIGHUP")
	f.StringSliceVar(&o.Only, "only", nil, "features to run, like guard,filter; default: all")
	f.StringVar(&o.Listen, "listen", "127.0.0.1:9743", "address of /metrics and /healthz (0.0.0.0: IPv4 alone); empty for none, which is the default with --only")
	o.sockets = map[string]*string{}
	for name, x := range host.SocketFlags() {
		o.sockets[name] = f.String(x.Name, x.Default, x.Usage+", by default beside --socket; empty for none")
	}
	c.MarkFlagFilename("file", "yaml", "yml")
	_ = c.RegisterFlagCompletionFunc("only", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return host.Features(), cobra.ShellCompDirectiveNoFileComp
	})
	return c
}

// resolve sets the defaults of flags that depend on other flags.
func (o *serveFlags) resolve(cmd *cobra.Command, g *cli.Globals) error {
	given := cmd.Flags().Changed
	if err := host.CheckOnly(o.Only); err != nil {
		return cli.Usage(fmt.Errorf("--only: %w", err))
	}
	if o.File == "-" {
		return cli.Usage(errors.New("-f -: weir serve reads its file again: name a file"))
	}
	apart := len(o.Only) > 0
	o.Socket, o.Keeper = g.Socket, keeperSocket(g)
	if apart && !given("socket") {
		o.Socket = ""
	}
	if apart && !given("listen") {
		o.Listen = ""
	}
	o.Sockets = map[string]string{}
	for name, x := range host.SocketFlags() {
		path := *o.sockets[name]
		switch {
		case given(x.Name):
		case apart && !slices.Contains(o.Only, name):
			path = ""
		case g.Socket != "":
			path = filepath.Join(filepath.Dir(g.Socket), filepath.Base(path))
		}
		o.Sockets[name] = path
	}
	return nil
}

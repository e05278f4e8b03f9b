// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
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
	"github.com/weir-project/weir/internal/users"
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
			log.Info("weir serve waits", "err", text)
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
		Use: "serve", Short: "Apply a file, run its long-lived tasks, and serve metrics", Args: cobra.NoArgs,
		Long: `Apply the configuration file (-f) at the start and at each SIGHUP, and run its
long-lived tasks:
  - give slots to members as soon as their sockets appear
  - replay templates of flow exporters to members without them
  - attach filters, and copies of datagrams, to interfaces that appear later
  - log links and BFD sessions that go down and up
  - serve /metrics and /healthz over HTTP (--listen)
  - answer reading commands of root and the group on a Unix socket (--socket)
  - let any collector register itself on --register-socket, with the Go package
    clients/go/register or clients/c/weir.h
  - keep live sessions of members on --handoff-socket: see weir handoff

Traffic does not need weir serve: stop, restart or kill it at any time. The kernel
itself withdraws the slot of a dead member. Only new members wait for weir serve,
or for weir steer admit. BFD sessions handed over by FRR's bfdd (frr:) end with
it, unless systemd restarts it.

A file with an error changes nothing: weir serve then does not start, and at
SIGHUP it keeps the running configuration. It does not start with a root outside a
BPF file system, or without the right to pin. Like weir apply, SIGHUP rejects a
change that would take traffic from its receiver. The first start after a boot
allows it, because members may start later. weir serve retries missing objects
every 5 s, also after SIGHUP, and applies instances again when their network
namespace returns. Until then /healthz shows the reason. A later weir apply
replaces the configuration of weir serve and cancels such retries. Without -f it
serves the applied state and ignores SIGHUP.

--only runs some features in a process of their own. The process keeps only their
capabilities, applies their part of the file, and listens only on sockets given by
flags. Without --only it keeps the capabilities of all features. The check of a
root member (ready.command) has these at most, other checks have none. --only
keeper needs no rights: a user without the right to pin can run it from the file
alone.`,
		Example: `  weir serve -f /etc/weir/weir.yaml
  weir serve -f /etc/weir/weir.yaml --only guard,filter --listen 127.0.0.1:9744`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.resolve(cmd, g); err != nil {
				return err
			}
			o.Log = cli.NewLog(os.Stderr)
			kernel.OnWait(logWait(o.Log))
			safefile.OnWait(logWait(o.Log))
			kernel.LiftMemlock() // needs CAP_SYS_RESOURCE, and is needed before Linux 5.11
			if err := host.DropRights(o.Only); err != nil {
				o.Log.Warn("unneeded capabilities not dropped", "err", err)
			}
			if o.File == "" {
				ignoreHangup(cmd.Context(), o.Log, "run weir apply to change the configuration")
			} else {
				o.Reload = hangups(cmd.Context())
			}
			return g.Host().Serve(cmd.Context(), o.ServeOptions)
		},
	}
	f := c.Flags()
	f.StringVarP(&o.File, "file", "f", "", "configuration file to apply at the start and at SIGHUP")
	f.StringSliceVar(&o.Only, "only", nil, "features to run, like guard,filter; default: all")
	f.StringVar(&o.Listen, "listen", "127.0.0.1:9743", "address of /metrics and /healthz (0.0.0.0: IPv4 only); empty for none (default with --only)")
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
		return cli.Usage(errors.New("-f -: weir serve reads its file again at SIGHUP: name a file"))
	}
	apart := len(o.Only) > 0
	o.Socket, o.Keeper = g.Socket, keeperSocket(g)
	if apart && !given("socket") {
		o.Socket = ""
	}
	if apart && !given("listen") {
		o.Listen = ""
	}
	if o.Listen != "" {
		if _, err := net.ResolveTCPAddr("tcp", o.Listen); err != nil {
			return cli.Usage(fmt.Errorf("--listen %s: %w: want an address and a port, like 127.0.0.1:9743", o.Listen, err))
		}
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

func prepareCommand(g *cli.Globals) *cobra.Command {
	var user string
	c := &cobra.Command{
		Use: "prepare", Short: "Give pins and records to the user of weir serve", Args: cobra.NoArgs,
		Long: `Create the directories of pins and records (/run/weir), and give them with their
contents to a user. A weir serve of this user then manages them, and needs no right
over files of root. Later commands of root create pins and records for the same
user. The units run it before weir serve.`,
		Example: `  weir prepare --user weir`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			id, err := users.Find(user)
			if err != nil {
				return fmt.Errorf("%w: create the user, for example by systemd-sysusers", err)
			}
			return g.Host().Root.Prepare(cmd.Context(), int(id.Credential.Uid), int(id.Credential.Gid))
		},
	}
	c.Flags().StringVar(&user, "user", "weir", "the user of weir serve")
	return c
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/steer/daemon"
	fmt "github.com/weir-project/weir/internal/printable"
)

// daemonStatus is the exit status of the daemon of weir steer run.
type daemonStatus int

func (s daemonStatus) Error() string { return fmt.Sprintf("the daemon ended with status %d", int(s)) }

func steerRun(g *cli.Globals) *cobra.Command {
	v := daemon.Supervision{Launch: launchCommand}
	slot := -1
	var bound, env []string
	var stop string
	c := &cobra.Command{
		Use: "run SERVICE --slot N -- DAEMON [ARG…]", Short: "Run a daemon as the member of a slot, without systemd", Args: serviceAndDaemon,
		Long: `Run a daemon in the foreground, in the service's network namespace, and give it
the slot once all its sockets exist. The slot is withdrawn when the daemon ends.
Signals (HUP, INT, QUIT, TERM, USR1, USR2) are forwarded. The exit status is the
daemon's own, or 128 plus the number of its fatal signal. HUP, INT and TERM end
this command in the same way.

With --listen-fds weir opens the service's sockets, one for each listen, and
passes them like systemd (LISTEN_FDS, LISTEN_PID, LISTEN_FDNAMES; see
sd_listen_fds(3)). They allow other slots on the same port. With --restart they
also stay open between runs of the daemon: datagrams and connections wait in their
queues.

The slot follows the daemon, not this command: if this command is killed, the
daemon keeps its traffic until it ends. While a living process has the slot, a
second run fails.

With --user the daemon gets a clean environment (PATH, USER, LOGNAME, HOME, the
language, the time zone, and the additions of --env) and no_new_privs: set-user-ID
programs and file capabilities have no effect.

With --replace the daemon becomes the slot's next generation (the service needs
generations: {} in its steer section). Both generations run side by side: the old
one keeps its UDP peers and QUIC connections, and the new one gets all other
traffic. Once the old one is drained, or at the deadline, it receives the signal
of --stop. By default this is the graceful stop signal of known servers: QUIT for
nginx and php-fpm, USR1 for HAProxy, WINCH for httpd, INT for lighttpd. If the new
one dies first, nothing has changed.`,
		Example: `  weir steer run telemetry --slot 0 -- nfacctd -f /etc/pmacct/nfacctd-0.conf
  weir steer run dns --slot 1 --listen-fds --restart --user dns -- /usr/bin/dnsd
  weir steer run www --slot 0 --replace -- nginx -c /etc/nginx/b.conf`,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if v.Bound, err = parseBound(bound); err != nil {
				return err
			}
			if v.Stop, err = stopSignal(cmd, stop); err != nil {
				return err
			}
			if v.Env, err = addedEnv(env); err != nil {
				return err
			}
			if v.Slot, err = findSlot(cmd, g, args[0], slot); err != nil {
				return err
			}
			v.Command = args[1:]
			v.Log = cli.NewLog(os.Stderr)
			signals := make(chan os.Signal, 16)
			signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2)
			v.Signals = signals
			// The running daemon handles the signals. This command ends with the daemon.
			v.Running = daemonEnds.Store
			status, err := v.Run(context.WithoutCancel(cmd.Context()), g.Host().Root)
			if err == nil && status != 0 {
				endLike(status)
				err = daemonStatus(status)
			}
			return err
		},
	}
	c.Flags().IntVar(&slot, "slot", -1, "number of the slot")
	c.Flags().BoolVar(&v.Give, "listen-fds", false, "open the service's sockets and pass them to the daemon")
	c.Flags().BoolVar(&v.Restart, "restart", false, "start the daemon again when it ends, until INT, QUIT or TERM")
	c.Flags().BoolVar(&v.TakeOver, "take-over", false, "take the slot from a living process")
	c.Flags().BoolVar(&v.Replace, "replace", false, "take the slot from a living process, and end it once it is drained")
	c.Flags().StringVar(&stop, "stop", "", "signal to end the replaced process (default: the graceful stop signal of its program, or TERM)")
	c.Flags().StringVar(&v.User, "user", "", "run the daemon as this user, by name or number, with a clean environment and no_new_privs")
	c.Flags().StringArrayVar(&env, "env", nil, "add NAME=VALUE, or NAME of this environment, to the daemon's environment")
	c.Flags().StringSliceVar(&bound, "bound", nil, "addresses of its sockets, one for each listen, if they differ")
	return c
}

// addedEnv completes the values of --env.
func addedEnv(given []string) ([]string, error) {
	var env []string
	for _, v := range given {
		name, _, set := strings.Cut(v, "=")
		if name == "" {
			return nil, cli.Usage(fmt.Errorf("--env %s: no name: want NAME=VALUE, or NAME", v))
		}
		if !set {
			value, ok := os.LookupEnv(name)
			if !ok {
				return nil, cli.Usage(fmt.Errorf("--env %s: %s is not set in the environment: give %s=VALUE", name, name, name))
			}
			v += "=" + value
		}
		env = append(env, v)
	}
	return env, nil
}

// endLike ends this process by the daemon's fatal signal if that is TERM, INT or HUP. systemd then reports the unit as
// stopped, not failed.
func endLike(status int) {
	switch sig := syscall.Signal(status - 128); sig {
	case syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP:
		signal.Reset(sig)
		syscall.Kill(os.Getpid(), sig)
		time.Sleep(time.Second) // the signal may be delivered on another thread
	}
}

func serviceAndDaemon(_ *cobra.Command, args []string) error {
	switch len(args) {
	case 0:
		return errors.New("name the service, and after -- the daemon")
	case 1:
		return errors.New("name the daemon after --, like weir steer run SERVICE --slot 0 -- nfacctd -f nfacctd.conf")
	}
	return nil
}

// launchVerb makes weir the program that sets LISTEN_PID and then execs the daemon, because the PID is unknown before
// the process exists. It is not a cobra command: cobra's signal handling would swallow a signal meant for the daemon.
const launchVerb = "__launch"

func launchCommand(argv []string) *exec.Cmd {
	// Use the open executable: the daemon's user may lack access to its path.
	return exec.Command("/proc/self/exe", append([]string{launchVerb}, argv...)...)
}

func launch(argv []string) {
	path, err := exec.LookPath(argv[0])
	if err == nil {
		env := append(os.Environ(), "LISTEN_PID="+strconv.Itoa(os.Getpid()))
		err = syscall.Exec(path, argv, env)
	}
	fmt.Fprintln(os.Stderr, "weir:", err)
	status := 126 // as in a shell
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		status = 127
	}
	os.Exit(status)
}

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
		Use: "run SERVICE --slot N -- DAEMON [ARG…]", Short: "Run a daemon as the member of a slot, where no systemd does", Args: serviceAndDaemon,
		Long: `Run a daemon in the foreground, in the service's network namespace, and give it
the slot once all its sockets are there. The slot is withdrawn when it ends.
Signals (HUP, INT, QUIT, TERM, USR1, USR2) are forwarded, and the exit status is
the daemon's own: 128 and the signal's number if one killed it (HUP, INT and
TERM end this command as they ended the daemon).

With --listen-fds weir opens the service's sockets, one for each listen, and
passes them as systemd does (LISTEN_FDS, LISTEN_PID, LISTEN_FDNAMES; see
sd_listen_fds(3)); they allow other slots on the same port. With --restart as
well they stay open while the daemon is away: datagrams and connections wait in
their queues for its next run.

The slot hangs on the daemon, not on this command: killed, it leaves the daemon
its traffic until that ends. While a living process has the slot, a second run
refuses to start.

With --user the daemon gets a clean environment (PATH, USER, LOGNAME, HOME, the
language, the time zone, and whatever --env adds), and no_new_privs: set-user-ID
programs and file capabilities give it nothing.

With --replace the daemon is the next generation of the one that has the slot
(the service has generations: {} in its steer section): both run side by side,
the old one keeps the UDP peers and QUIC connections that it has, all else is the
new one's, and once nothing is left with the old one, or at the deadline, it is
sent the signal of --stop: for servers that weir knows, by default, the one by which
they answer what they have begun (QUIT for nginx and php-fpm, USR1 for HAProxy, WINCH
for httpd, INT for lighttpd). If the new one dies first, nothing has happened.`,
		Example: `  weir steer run telemetry --slot 0 -- nfacctd -f /etc/pmacct/nfacctd-0.conf
  weir steer run dns --slot 1 --listen-fds --restart --user dns -- /usr/bin/dnsd
  weir steer run www --slot 0 --replace -- nginx -c /etc/nginx/b.conf`,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if v.Slot, err = findSlot(cmd, g, args[0], slot); err != nil {
				return err
			}
			if v.Bound, err = parseBound(bound); err != nil {
				return err
			}
			if v.Stop, err = stopSignal(cmd, stop); err != nil {
				return err
			}
			if v.Env, err = addedEnv(env); err != nil {
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
	c.Flags().BoolVar(&v.TakeOver, "take-over", false, "take the slot from a process that holds it and lives")
	c.Flags().BoolVar(&v.Replace, "replace", false, "take the slot from a process that holds it, and end that once it is drained")
	c.Flags().StringVar(&stop, "stop", "", "signal that ends the process that is replaced (default: the one that its program ends in good order by, or TERM)")
	c.Flags().StringVar(&v.User, "user", "", "run the daemon as this user, by name or number, with a clean environment and no_new_privs")
	c.Flags().StringArrayVar(&env, "env", nil, "add NAME=VALUE, or NAME of this environment, to the daemon's environment")
	c.Flags().StringSliceVar(&bound, "bound", nil, "where its sockets are bound, one for each listen, if not there")
	return c
}

// addedEnv completes the values of --env.
func addedEnv(given []string) ([]string, error) {
	var env []string
	for _, v := range given {
		name, _, set := strings.Cut(v, "=")
		if name == "" {
			return nil, cli.Usage(fmt.Errorf("--env %s: no name: say NAME=VALUE, or NAME", v))
		}
		if !set {
			value, ok := os.LookupEnv(name)
			if !ok {
				return nil, cli.Usage(fmt.Errorf("--env %s: the environment has no %s: say %s=VALUE", name, name, name))
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/terminal"
	"github.com/weir-project/weir/kernel"
)

// endTime bounds how long a command runs on after INT or TERM. The documentation promises 5 s.
const endTime = 4 * time.Second

// reactTime bounds how long a changing command takes to exit, or to report a rollback, after INT or TERM. The
// documentation promises 1 s.
const reactTime = 800 * time.Millisecond

// daemonEnds is set while a command waits for its daemon to exit. Signals are forwarded to the daemon.
var daemonEnds atomic.Bool

// cut describes the end of an interrupted change.
type cut struct {
	rollsBack bool   // the change is rolled back, within endTime
	remedy    string // printed for a half-done change
}

// changes is the cut of the running command. It is nil if the command changes nothing or handles its end itself.
var changes atomic.Pointer[cut]

// of makes a command react to INT or TERM within reactTime. Exiting then is as harmless as any kill: the next command
// that takes the lock recovers the change.
func (c cut) of(cmd *cobra.Command) *cobra.Command {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		changes.Store(&c)
		return run(cmd, args)
	}
	return cmd
}

// untilSignal returns a context cancelled by INT or TERM. Commands then stop in their own way and roll back a change in
// progress. After endTime the process exits, because a file system or a terminal does not answer. This is as harmless as
// any kill: the next command recovers the change. A second signal kills at once.
func untilSignal() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() {
		stop()
		if c := changes.Load(); c != nil {
			time.Sleep(reactTime)
			c.react()
			time.Sleep(endTime - reactTime)
			if now, _ := kernel.Writing(); now {
				exit("half done: the rollback takes longer than " + endTime.String() + ": " + c.remedy)
			}
			exit("interrupted: " + inForce)
		}
		time.Sleep(endTime)
		if daemonEnds.Load() {
			for daemonEnds.Load() {
				time.Sleep(endTime / 20)
			}
			time.Sleep(endTime)
		}
		exit(fmt.Sprintf("exit forced %s after the signal: a file system, process or terminal does not answer", endTime))
	})
	return ctx, stop
}

// react exits if nothing can be rolled back, or reports the rollback in progress.
func (c *cut) react() {
	now, ever := kernel.Writing()
	switch {
	case !ever:
		exit("interrupted: nothing was changed")
	case now && c.rollsBack:
		tell("interrupted: rolling the change back; a second signal exits at once")
	case now:
		exit("half done: " + c.remedy)
	case !c.rollsBack: // the session keeper moves sessions with the change, within endTime
		exit("interrupted: " + inForce)
	}
}

// inForce describes a change interrupted after it was made.
const inForce = "the change is in force; a running weir serve resets misplaced sessions, or run weir steer reset SERVICE"

// tell writes to standard error. It gives up after endTime/20, because a full pipe blocks the write.
func tell(text string) {
	said := make(chan struct{})
	go func() {
		defer close(said)
		terminal.Clear()
		fmt.Fprintln(os.Stderr, "weir:", text)
	}()
	select {
	case <-said:
	case <-time.After(endTime / 20):
	}
}

func exit(text string) {
	tell(text)
	os.Exit(exitFailed)
}

// ended adds the outcome to the error of an interrupted command, unless the error has it already.
func ended(ctx context.Context, err error) error {
	if ctx.Err() == nil || !errors.Is(err, context.Canceled) {
		return err
	}
	if _, ever := kernel.Writing(); changes.Load() != nil && !ever {
		return kernel.Stopped(ctx, err, "nothing was changed")
	}
	if _, told := errors.AsType[*kernel.Interrupted](err); told {
		return err
	}
	if err == context.Canceled { //nolint:errorlint // a bare one says nothing
		return errors.New("interrupted")
	}
	return fmt.Errorf("interrupted: %w", err)
}

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
	"github.com/weir-project/weir/kernel"
)

// endTime is how long a command may take to end after INT or TERM. Users are promised 5 s.
const endTime = 4 * time.Second

// reactTime is how long a command that changes something may take to end, or to say that it takes a change back. Users
// are promised 1 s.
const reactTime = 800 * time.Millisecond

// daemonEnds is set while a command ends with a daemon that it has started, to which signals are forwarded.
var daemonEnds atomic.Bool

// cut is what to tell if a change has to end before it is done.
type cut struct {
	rollsBack bool   // the change is taken back, for which endTime is granted
	remedy    string // of a change that is half done
}

// changes is the cut of the command that runs; nil: it changes nothing, or ends in its own way.
var changes atomic.Pointer[cut]

// of makes a command react within reactTime of INT or TERM. It is harmless to end the process then, as every kill is: the
// next command that takes the lock finishes what it finds.
func (c cut) of(cmd *cobra.Command) *cobra.Command {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		changes.Store(&c)
		return run(cmd, args)
	}
	return cmd
}

// untilSignal is a context that INT and TERM end. Commands end by it in their own way, which takes back a change that is under
// way. One that has not ended within endTime waits for something that does not answer, a file system or a terminal: the
// process exits then. That is harmless, as every kill is: the next command recovers what it finds. A second signal kills at once.
func untilSignal() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() {
		stop()
		if c := changes.Load(); c != nil {
			time.Sleep(reactTime)
			c.react()
			time.Sleep(endTime - reactTime)
			if now, _ := kernel.Writing(); now {
				exit("half done: taking the change back takes longer than " + endTime.String() + ": " + c.remedy)
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
		exit(fmt.Sprintf("something does not answer, %s after the signal: ended without it", endTime))
	})
	return ctx, stop
}

// react ends a change that has not ended by itself, or says that it takes its time.
func (c *cut) react() {
	now, ever := kernel.Writing()
	switch {
	case !ever:
		exit("interrupted: nothing was changed")
	case now && c.rollsBack:
		tell("interrupted: taking back what was done; a second signal ends at once")
	case now:
		exit("half done: " + c.remedy)
	case !c.rollsBack: // sessions that move with a change are at the keeper: they get endTime
		exit("interrupted: " + inForce)
	}
}

// inForce is what became of a change that is interrupted after it was made.
const inForce = "the change is in force; a running weir serve resets the sessions that it misplaced, or weir steer reset SERVICE"

// tell writes to standard error, unless nobody reads that.
func tell(text string) {
	said := make(chan struct{})
	go func() {
		defer close(said)
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

// ended says what became of a command that a signal ended, where its error says no more than that.
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

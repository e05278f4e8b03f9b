// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	fmt "github.com/weir-project/weir/internal/printable"
)

// endTime is how long a command may take to end after INT or TERM. Whoever stops it is promised 5 s.
const endTime = 4 * time.Second

// daemonEnds is set while a command ends with a daemon that it has started, to which signals are forwarded.
var daemonEnds atomic.Bool

// untilSignal is a context that INT and TERM end. Commands end by it in their own way, which takes back a change that is under
// way. One that has not ended within endTime waits for something that does not answer, a file system or a terminal: the
// process exits then. That is harmless, as every kill is: the next command mends what it finds. A second signal kills at once.
func untilSignal() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() {
		stop()
		time.Sleep(endTime)
		if daemonEnds.Load() {
			for daemonEnds.Load() {
				time.Sleep(endTime / 20)
			}
			time.Sleep(endTime)
		}
		said := make(chan struct{})
		go func() {
			defer close(said)
			fmt.Fprintf(os.Stderr, "weir: something does not answer, %s after the signal: ended without it\n", endTime)
		}()
		select {
		case <-said:
		case <-time.After(endTime / 20): // nobody reads that
		}
		os.Exit(exitFailed)
	})
	return ctx, stop
}

// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"bufio"
	"context"
	"io"
	"strings"
	"syscall"
	"time"

	"github.com/weir-project/weir/lab"
)

// interruptAt is the log line of the worst moment to interrupt a run: namespaces, pins, collectors and
// traffic all exist.
const interruptAt = "all is calm"

// interruption is a run of this experiment with Ctrl-C half way. It must leave nothing behind.
type interruption struct {
	proc  *lab.Process
	heard chan struct{} // closed at interruptAt
	done  chan struct{} // closed when its leftovers are known
	left  []string
	early bool // it ended before the interruption
}

// startInterruption starts the run to interrupt, in parallel to the start of our own collectors. It returns
// nil inside such a run, and in the control run.
func (x *experiment) startInterruption(ctx context.Context) *interruption {
	if x.env.Child || x.env.Control {
		return nil
	}
	i := &interruption{heard: make(chan struct{}), done: make(chan struct{})}
	in, out := io.Pipe()
	var err error
	i.proc, err = x.env.Start(lab.Command{Path: x.env.Self(), Args: []string{"run", "telemetry", "--smoke", "--json"},
		Env: []string{lab.ChildMark + "=1"}, Output: out, Stdout: io.Discard})
	if err != nil {
		x.result.Note("start the run to interrupt: %v", err)
		return nil
	}
	x.env.OnClose(i.end)
	go func() { // ends with the pipe
		heard := false
		for lines := bufio.NewScanner(in); lines.Scan(); {
			if !heard && strings.Contains(lines.Text(), interruptAt) {
				heard = true
				close(i.heard)
			}
		}
	}()
	go func() {
		defer close(i.done)
		select {
		case <-i.heard:
			_ = i.proc.Signal(syscall.SIGINT)
		case <-i.proc.Done():
			i.early = true
		case <-ctx.Done():
			return
		}
		select {
		case <-i.proc.Done():
		case <-time.After(time.Minute): // usually two seconds; a busy machine may need more
			i.early = true // it did not end: this is not a pass
			i.end()
		}
		out.Close()
		i.left = lab.RunLeftovers(i.proc.PID)
	}()
	return i
}

// end ends the run by SIGINT, for a clean exit, and by force if it does not exit.
func (i *interruption) end() {
	if !i.proc.Running() {
		return
	}
	_ = i.proc.Signal(syscall.SIGINT)
	select {
	case <-i.proc.Done():
	case <-time.After(30 * time.Second):
		_ = i.proc.Signal(syscall.SIGKILL)
	}
}

// wait waits for the interrupted run and adds its leftovers to the result.
func (i *interruption) wait(ctx context.Context, r *lab.Result) error {
	if i == nil {
		return nil
	}
	select {
	case <-i.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	if i.early {
		i.left = append(i.left, "the interrupted run: it ended before the interruption, or did not end")
	}
	for _, l := range i.left {
		r.Note("left after SIGINT: %s", l)
	}
	r.Set(lab.LeftoversMetric, float64(len(i.left)))
	r.Set("interrupted_runs", 1)
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"log/slog"
	"time"

	"github.com/weir-project/weir/kernel"
)

// Timing of an Agent.
const (
	specEvery = time.Second // interval of checks for a new spec, if no event reports it
	againMin  = time.Second // delay before restarting a failed agent; it doubles up to againMax
	againMax  = 10 * time.Second
)

// Agent runs a feature's process in weir serve with the applied spec. It starts, restarts and stops the process as the
// spec changes.
type Agent[C any] struct {
	Applied[C]
	// Start runs until ctx is done. After an earlier error it is called again with a delay.
	Start func(ctx context.Context, r *kernel.Root, spec *C, log *slog.Logger) error
}

// Run implements Runner.
func (a Agent[C]) Run(ctx context.Context, r *kernel.Root, log Logger) error {
	var now *C
	var said Reported[string]
	stop := func() {}
	for range (Loop{Every: specEvery, Root: r}).Turns(ctx) {
		spec, err := a.Read(r)
		switch {
		case err != nil:
			if said.Changed(a.Feature, err.Error()) {
				log.Warn("spec unreadable, keeping the current one", "feature", a.Feature, "err", err)
			}
		case !a.Same(now, spec):
			stop()
			said = Reported[string]{}
			now, stop = spec, a.start(ctx, r, spec, log)
		}
	}
	stop()
	return nil
}

// start runs the agent with a spec, and restarts it after failures. stop ends the agent and waits for its end.
func (a Agent[C]) start(ctx context.Context, r *kernel.Root, spec *C, log Logger) (stop func()) {
	if spec == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for pause := againMin; ; pause = min(2*pause, againMax) {
			err := a.Start(ctx, r, spec, newSlog(log))
			if ctx.Err() != nil {
				return
			}
			log.Warn("agent ended, restarting", "feature", a.Feature, "delay", pause, "err", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
	}()
	return func() { cancel(); <-done }
}

// newSlog returns a Logger as an slog.Logger.
func newSlog(l Logger) *slog.Logger {
	if s, ok := l.(*slog.Logger); ok {
		return s
	}
	return slog.New(slog.DiscardHandler)
}

// AgentPins is implemented by features whose process in weir serve attaches instances, in place of weir apply.
type AgentPins interface {
	// AgentPins names their pin directory: the Feature of its instances.
	AgentPins() string
}

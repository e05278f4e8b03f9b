// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"log/slog"
	"time"

	"github.com/weir-project/weir/kernel"
)

// Times of an Agent.
const (
	specEvery = time.Second // between two looks for another spec where nothing tells of it
	againMin  = time.Second // before an agent that has failed starts again; it doubles
	againMax  = 10 * time.Second
)

// Agent runs the process of a feature in weir serve by the spec that is applied: it starts, starts anew and ends with it.
type Agent[C any] struct {
	Applied[C]
	// Start runs until ctx is done. An error before that has it start again after a pause.
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
				log.Warn("spec unreadable, nothing changes", "feature", a.Feature, "err", err)
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

// start runs the agent with a spec, again after each failure, until stop is called, which waits for its end.
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
			log.Warn("agent ended, starting again", "feature", a.Feature, "after", pause, "err", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
	}()
	return func() { cancel(); <-done }
}

// newSlog is a Logger for packages that take one of log/slog.
func newSlog(l Logger) *slog.Logger {
	if s, ok := l.(*slog.Logger); ok {
		return s
	}
	return slog.New(slog.DiscardHandler)
}

// AgentPins is implemented by features whose process in weir serve, and not weir apply, attaches the instances of a pin directory.
type AgentPins interface {
	// AgentPins names the directory: the Feature of its instances.
	AgentPins() string
}

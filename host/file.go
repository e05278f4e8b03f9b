// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/printable"
)

// retryEvery is the time between two attempts of weir serve to apply its file.
const retryEvery = 5 * time.Second

// file is the configuration file of weir serve.
type file struct {
	path   string
	only   []string // features to run; empty: all
	listen string   // TCP address for /metrics and /healthz; empty: none

	sockets []feature.FileSocket // sockets that use the file without pins; none: the file is applied

	mu      sync.Mutex
	untried bool  // the first attempt has not ended
	refused error // why the file of the last reload was rejected; it is not retried
	err     error // error of the last attempt, to be retried
	lost    bool  // an instance was lost with its network namespace, and is not applied again yet
}

// failure returns why the file is not in force, from the last attempt to apply it. A nil file has no failure.
func (f *file) failure() error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.untried {
		return fmt.Errorf("%s is not applied yet: the first attempt has not ended", f.path)
	}
	if err := errors.Join(f.refused, f.err); err != nil {
		return fmt.Errorf("%s is not applied: %w", f.path, err)
	}
	return nil
}

// incomplete reports whether an instance of the file was lost with its network namespace. It is false for a nil file.
func (f *file) incomplete() bool {
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lost
}

// noteLost records whether an instance was lost with its network namespace.
func (f *file) noteLost(lost bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost = lost
}

// noteRefused records and logs why the file of a reload was rejected. A nil err means that the file was applied, or will
// be retried.
func (f *file) noteRefused(err error, log *slog.Logger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.untried = false
	if f.refused = err; err != nil {
		log.Error("file rejected, nothing changed", "file", f.path, "err", oneLine(err))
	}
}

// noteAttempt records the outcome of an attempt, and logs each failure once.
func (f *file) noteAttempt(err error, log *slog.Logger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil && (f.err == nil || f.err.Error() != err.Error()) {
		log.Error("file not applied yet, retrying", "file", f.path, "interval", retryEvery, "err", oneLine(err))
	}
	f.untried, f.err = false, err
}

// load reads the file for the features of this process.
func (f *file) load() (*Config, error) {
	c, err := LoadConfig(f.path, f.only...)
	if err != nil {
		return nil, err
	}
	for _, l := range c.listens() {
		if l.Excludes(feature.Listen{Address: f.listen}) {
			return nil, l.Errorf("%s: listen %q: weir serve uses that port for /metrics, with --listen %s: use another port for one of them", l.Section, l.Address, f.listen)
		}
	}
	return c, nil
}

// apply makes the host match the file, or only this process if it does not pin. changed reports whether steps of the
// file, not of a recovery, were applied. A failed attempt is undone.
func (f *file) apply(ctx context.Context, h *Host, c *Config, log *slog.Logger) (changed bool, err error) {
	if len(f.sockets) > 0 {
		return false, f.configure(c, log)
	}
	c.Warned = func(text string) { log.Warn("file applied with a warning", "file", f.path, "warning", text) }
	steps := 0
	err = h.Apply(ctx, c, func(d Done) {
		steps++
		changed = changed || d.Step.Verb != recoverVerb
		log.Info("applied", "step", d.Step.String(), "note", d.Note)
	})
	if err == nil {
		log.Info("file applied", "file", f.path, "steps", steps)
	}
	return changed, err
}

// configure makes the sockets use the file.
func (f *file) configure(c *Config, log *slog.Logger) error {
	for _, s := range f.sockets {
		if err := s.Configure(c.Document()); err != nil {
			return err
		}
	}
	log.Info("file in force, without pins", "file", f.path)
	return nil
}

// oneLine formats an error for one line of the log.
func oneLine(err error) error { return errors.New(printable.OneLine(err.Error())) }

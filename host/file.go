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
	only   []string // features; empty: all
	listen string   // TCP address of weir serve itself; empty: none

	sockets []feature.FileSocket // that go by the file without pins; none: the file is applied

	mu      sync.Mutex
	untried bool  // its first attempt has not ended
	refused error // why the file of the last reload changed nothing; it is not tried again
	err     error // of the last attempt to apply what is to be in force; it is tried again
	lost    bool  // something went with its network namespace, and is not applied again yet
}

// failure says why the file is not in force, as of the last attempt to apply it. A nil file has no failure.
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

// incomplete reports whether something of the file went with its network namespace. Of a nil file nothing did.
func (f *file) incomplete() bool {
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lost
}

// noteLost keeps whether something went with its network namespace.
func (f *file) noteLost(lost bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost = lost
}

// noteRefused keeps and logs why the file of a reload changed nothing; nil: it was read, and is applied or tried again.
func (f *file) noteRefused(err error, log *slog.Logger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.untried = false
	if f.refused = err; err != nil {
		log.Error("file not applied, everything stays as it was", "file", f.path, "err", oneLine(err))
	}
}

// noteAttempt keeps the outcome of an attempt, and logs a failure once.
func (f *file) noteAttempt(err error, log *slog.Logger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil && (f.err == nil || f.err.Error() != err.Error()) {
		log.Error("file not applied yet, trying again", "file", f.path, "interval", retryEvery, "err", oneLine(err))
	}
	f.untried, f.err = false, err
}

// load reads the file for the features that this process runs.
func (f *file) load() (*Config, error) {
	c, err := LoadConfig(f.path, f.only...)
	if err != nil {
		return nil, err
	}
	for _, l := range c.listens() {
		if l.Excludes(feature.Listen{Address: f.listen}) {
			return nil, l.Errorf("%s: listen %q: weir serve has that port for /metrics, with --listen %s: take another port for one of them", l.Section, l.Address, f.listen)
		}
	}
	return c, nil
}

// apply makes the host match the file, or this process alone where nothing is pinned. changed says that steps of the file, not
// of a recovery, were carried out; those of a failed attempt are taken back.
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

// configure has the sockets go by the file.
func (f *file) configure(c *Config, log *slog.Logger) error {
	for _, s := range f.sockets {
		if err := s.Configure(c.Document()); err != nil {
			return err
		}
	}
	log.Info("file in force, without pins", "file", f.path)
	return nil
}

// oneLine is an error as an attribute of a log line.
func oneLine(err error) error { return errors.New(printable.OneLine(err.Error())) }

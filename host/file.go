// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/feature"
)

// retryEvery is the time between two attempts to apply the file at the start of weir serve.
const retryEvery = 5 * time.Second

// file is the configuration file of weir serve.
type file struct {
	path string
	only []string // features; empty: all

	sockets []feature.FileSocket // that go by the file without pins; none: the file is applied

	mu  sync.Mutex
	err error // of the last attempt to apply it
}

// failure is the error of the last attempt to apply the file. A nil file has none.
func (f *file) failure() error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		return nil
	}
	return fmt.Errorf("%s is not applied: %w", f.path, f.err)
}

// load reads the file for the features that this process runs.
func (f *file) load() (*Config, error) {
	c, err := LoadConfig(f.path)
	if err != nil {
		return nil, err
	}
	c.Only = f.only
	return c, nil
}

// follow applies the file, first c, and again at each reload, until ctx is done. A file that cannot be applied changes
// nothing. At the start weir serve tries again: a network namespace, an interface or a member may come late. Outages are allowed
// where nothing is applied yet, as after a boot: members may come after weir serve.
func (f *file) follow(ctx context.Context, h *Host, c *Config, reload <-chan struct{}, log *slog.Logger) error {
	all, err := h.Root.Instances("")
	c.AllowOutage = err == nil && len(all) == 0
	starting := true
	again := time.NewTimer(0)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-again.C:
		case <-reload:
			again.Stop()
			next, err := f.load()
			if err != nil {
				f.told(err, log)
				continue
			}
			c, starting = next, false
		}
		err := f.apply(ctx, h, c, log)
		if ctx.Err() != nil {
			return nil
		}
		f.told(err, log)
		if err != nil && starting {
			again.Reset(retryEvery)
		}
	}
}

// told notes the outcome of an attempt, and logs a failure once.
func (f *file) told(err error, log *slog.Logger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil && (f.err == nil || f.err.Error() != err.Error()) {
		log.Error("file not applied, everything stays as it was", "file", f.path, "err", oneLine(err))
	}
	f.err = err
}

// apply makes the host match the file, or this process alone where nothing is pinned.
func (f *file) apply(ctx context.Context, h *Host, c *Config, log *slog.Logger) error {
	if len(f.sockets) > 0 {
		return f.configure(c, log)
	}
	c.Warned = func(text string) { log.Warn("file applied with a warning", "file", f.path, "warning", text) }
	steps := 0
	err := h.Apply(ctx, c, func(d Done) {
		steps++
		log.Info("applied", "step", d.Step.String(), "note", d.Note)
	})
	if err == nil {
		log.Info("file applied", "file", f.path, "steps", steps)
	}
	return err
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
func oneLine(err error) error { return errors.New(strings.ReplaceAll(err.Error(), "\n", "; ")) }

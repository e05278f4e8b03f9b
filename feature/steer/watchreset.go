// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/reset"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/kernel"
)

// takeOverAfter is the delay before the watcher takes over due resets. The command that made them due claims them
// within moments, unless it was killed.
const takeOverAfter = 3 * time.Second

// resets are the watcher's resets: left by killed commands, or caused by its own admissions. Each engine has at most
// one run.
type resets struct {
	seen map[kernel.Instance]time.Time // first time found due
	busy map[kernel.Instance]chan struct{}
	own  map[kernel.Instance]bool // made due by this watcher
}

// resetDue checks for due resets without a lock, and starts them.
func (w *watcher) resetDue(ctx context.Context) {
	if w.resets.seen == nil {
		w.resets = resets{map[kernel.Instance]time.Time{}, map[kernel.Instance]chan struct{}{}, map[kernel.Instance]bool{}}
	}
	all, err := w.root.Instances(spec.Name)
	if err != nil {
		return
	}
	for _, i := range all {
		if _, ok := record.EngineKind(i); !ok {
			continue
		}
		if done := w.resets.busy[i]; done != nil {
			select {
			case <-done:
				delete(w.resets.busy, i)
			default:
				continue
			}
		}
		if v, err := reset.Due(w.root, i); err != nil || v == 0 {
			delete(w.resets.seen, i)
			continue
		}
		first, known := w.resets.seen[i]
		if !known {
			first = time.Now()
			w.resets.seen[i] = first
		}
		if !w.resets.own[i] && time.Since(first) < takeOverAfter {
			continue
		}
		delete(w.resets.own, i)
		delete(w.resets.seen, i)
		done := make(chan struct{})
		w.resets.busy[i] = done
		go func() {
			defer close(done)
			err := reset.ResetEngine(ctx, w.root, i, nil, w.hand, false, w.logReset)
			if err != nil && !errors.Is(err, reset.ErrBusy) && ctx.Err() == nil {
				w.log.Warn("reset of misplaced sessions failed", "err", err)
			}
		}()
	}
}

func (w *watcher) logReset(r reset.Reset) {
	if r.Err != nil {
		w.log.Warn("misplaced session not reset", "service", r.Service, "router", r.Router(), "slots", r.Slots(), "err", r.Err)
		return
	}
	if r.Handed {
		w.log.Info("session handed over", "service", r.Service, "router", r.Router(), "slots", r.Slots())
		return
	}
	w.log.Info("session reset", "service", r.Service, "router", r.Router(), "slots", r.Slots())
}

// waitResets waits for running resets after ctx is done.
func (w *watcher) waitResets() {
	for _, done := range w.resets.busy {
		<-done
	}
}

// ownResets makes the resets caused by an admission start at once.
func (w *watcher) ownResets(s *state.Service) {
	if w.resets.own != nil {
		w.resets.own[s.Record.EngineInstance(s.PinScope)] = true
	}
}

// followFile reloads a service's devices after their file has changed.
func (w *watcher) followFile(ctx context.Context, s *state.Service) {
	if s.By != spec.ByDevice || s.Record.Devices == nil {
		return
	}
	now, err := safefile.Stat(s.DevicesFile)
	key := slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: -2}
	if err == nil {
		name := s.PinScope + "/" + s.Name + " " + s.DevicesFile
		if w.files[name] == now && w.said.Last(key) == "" {
			return
		}
		if w.files == nil {
			w.files = map[string]safefile.Seen{}
		}
		w.files[name] = now
		err = w.reload(ctx, s)
	}
	w.sayDevices(key, s, err)
}

// reload publishes a service with the current content of its devices file.
func (w *watcher) reload(ctx context.Context, s *state.Service) error {
	list, err := spec.LoadDevices(s.DevicesFile)
	if err != nil {
		return err
	}
	if *list.File() == *s.Record.Devices {
		return nil
	}
	l, unlock, err := w.own.Lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := engine.Change(l, s.PinScope, s.Name, nil, func(p *record.Service) error { p.SetDevices(list); return nil }); err != nil {
		return err
	}
	w.log.Info("devices file reloaded", "service", s.Name, "file", s.DevicesFile, "devices", len(list.Devices))
	w.templates.Kick()
	w.ownResets(s)
	return nil
}

// sayDevices logs once that a devices file is not usable. The previous devices stay in force.
func (w *watcher) sayDevices(key slots.Slot, s *state.Service, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if w.said.Changed(key, text) && err != nil {
		w.log.Warn("devices file rejected, previous devices stay", "service", s.Name, "err", text)
	}
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/weir-project/weir/feature"
)

// follower keeps the host as the file of weir serve has it.
type follower struct {
	*file
	host *Host
	log  *slog.Logger

	spec  *Config // in force, or to be applied
	due   bool    // spec is to be applied
	again *time.Timer
	// before are the files in force, by feature, when spec became due or came into force: a later one of somebody else goes
	// before spec.
	before map[string]string
	kept   *fileInForce            // before spec became due by a reload
	had    map[instanceName]string // what was applied at the last check, with its scope
	pause  time.Time               // until then what is lost is not tried again
}

// fileInForce is a file that is or was in force and, by feature, the files in force then.
type fileInForce struct {
	spec  *Config
	files map[string]string
}

// follow applies the file, first c, and again at each reload, until ctx is done. A file that cannot be applied changes
// nothing. Where something is missing weir serve tries again: a network namespace, an interface or a member may come late.
// What went with its network namespace is applied again when that is back.
// Outages are allowed where nothing is applied yet, as after a boot: members may come after weir serve.
func (f *file) follow(ctx context.Context, h *Host, c *Config, reload <-chan struct{}, log *slog.Logger) error {
	c.AllowOutage = h.blank()
	w := &follower{file: f, host: h, log: log, spec: c, due: true, again: time.NewTimer(0), before: h.filesInForce()}
	defer w.again.Stop()
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.again.C:
			w.attempt(ctx)
		case <-tick.C:
			w.check(ctx)
		case <-reload:
			w.reload(ctx)
		}
	}
}

// reload reads the file and applies it. A refused file, a file with an error and one that failed half way leave weir serve with
// the one in force: the operator has to decide.
func (w *follower) reload(ctx context.Context) {
	next, err := w.load()
	if err != nil {
		if len(w.sockets) == 0 {
			w.host.noteUnread(ctx, err)
		}
		w.refuse(err)
		return
	}
	before := w.host.filesInForce()
	changed, err := w.apply(ctx, w.host, next, w.log)
	switch {
	case ctx.Err() != nil:
		return
	case err == nil:
		w.inForce(next)
	case final(changed, err) && !w.starting():
		w.refuse(err)
		return
	default:
		if !w.due {
			w.kept = &fileInForce{w.spec, w.before}
		}
		w.spec, w.due, w.before = next, true, before
		w.again.Reset(retryEvery)
	}
	w.noteRefused(nil, w.log)
	w.noteAttempt(err, w.log)
}

// starting reports whether no file of this process is in force yet.
func (w *follower) starting() bool { return w.due && w.kept == nil }

// refuse tells why contents of the file stay without effect, and goes by those in force: none that the file had in between is tried
// again. Those of the start are, for there are no others.
func (w *follower) refuse(err error) {
	if w.due && !w.starting() {
		w.spec, w.before, w.due, w.kept = w.kept.spec, w.kept.files, false, nil
		w.noteAttempt(nil, w.log)
	}
	w.noteRefused(err, w.log)
}

// final reports whether a failed change is not tried again: it needs a decision, or would disturb traffic at each attempt.
func final(changed bool, err error) bool {
	if _, ok := errors.AsType[*appliedInPart](err); ok {
		return false
	}
	return changed || errors.Is(err, feature.ErrOutage) || errors.Is(err, errUnconfirmed)
}

// attempt applies what is due, and tries again later where that fails.
func (w *follower) attempt(ctx context.Context) {
	if !w.due {
		return
	}
	if w.superseded(featureNames(featuresOnly(w.only))) {
		w.log.Info("another file was applied, this one is not tried again", "file", w.path)
		w.due = false
		w.noteAttempt(nil, w.log)
		return
	}
	c := *w.spec
	c.AllowOutage = c.AllowOutage || w.host.blank()
	changed, err := w.apply(ctx, w.host, &c, w.log)
	switch {
	case ctx.Err() != nil:
		return
	case err == nil:
		w.inForce(w.spec)
	case final(changed, err) && !w.starting():
		w.refuse(err)
		return
	default:
		w.again.Reset(retryEvery)
	}
	w.noteAttempt(err, w.log)
}

// blank reports whether nothing is applied.
func (h *Host) blank() bool {
	all, err := h.Root.Instances("")
	return err == nil && len(all) == 0
}

// inForce notes that a file is in force.
func (w *follower) inForce(c *Config) {
	w.spec, w.due, w.before, w.kept = c, false, w.host.filesInForce(), nil
	w.had, _ = w.applied() // an error: the next check finds out
	w.noteLost(false)
}

// superseded reports whether somebody has applied another file for these features since, or removed one: weir serve does not undo
// that.
func (w *follower) superseded(names []string) bool {
	now := w.host.filesInForce()
	for _, name := range names {
		if now[name] != w.before[name] && now[name] != w.spec.hash {
			return true
		}
	}
	return false
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/weir-project/weir/feature"
)

// follower keeps the host in step with weir serve's file.
type follower struct {
	*file
	host *Host
	log  *slog.Logger

	spec  *Config // in force, or to be applied
	due   bool    // spec is to be applied
	again *time.Timer
	// before are the files in force, by feature, when spec became due or took effect. A later file of another process
	// overrides spec.
	before map[string]string
	kept   *fileInForce            // state before a reload made spec due
	had    map[instanceName]string // instances applied at the last check, with their scopes
	pause  time.Time               // until then lost instances are not retried
}

// fileInForce is a file in force, with the files of all features at that time.
type fileInForce struct {
	spec  *Config
	files map[string]string
}

// follow applies the file until ctx is done: first c, then the file at each reload. A file with an error changes
// nothing. weir serve retries missing objects: a network namespace, an interface or a member may appear late. Instances
// lost with their network namespace are applied again when it returns. Outages are allowed if nothing is applied yet, as
// after a boot: members may start after weir serve.
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

// reload reads and applies the file. After a rejected or invalid file, or a failure midway, the previous file
// stays in force: the operator must decide.
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

// starting reports whether this process has no file in force yet.
func (w *follower) starting() bool { return w.due && w.kept == nil }

// refuse records why the file has no effect, and returns to the contents in force. Contents in between are not retried.
// The initial contents are retried, because there are no others.
func (w *follower) refuse(err error) {
	if w.due && !w.starting() {
		w.spec, w.before, w.due, w.kept = w.kept.spec, w.kept.files, false, nil
		w.noteAttempt(nil, w.log)
	}
	w.noteRefused(err, w.log)
}

// final reports whether a failed change must not be retried: it needs a decision, or would disturb traffic at each
// attempt.
func final(changed bool, err error) bool {
	if _, ok := errors.AsType[*appliedInPart](err); ok {
		return false
	}
	return changed || errors.Is(err, feature.ErrOutage) || errors.Is(err, errUnconfirmed)
}

// attempt applies the due file, and schedules a retry on failure.
func (w *follower) attempt(ctx context.Context) {
	if !w.due {
		return
	}
	if w.superseded(featureNames(featuresOnly(w.only))) {
		w.log.Info("another file was applied, retries end", "file", w.path)
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

// inForce records that a file is in force.
func (w *follower) inForce(c *Config) {
	w.spec, w.due, w.before, w.kept = c, false, w.host.filesInForce(), nil
	w.had, _ = w.applied() // after an error the next check reads it
	w.noteLost(false)
}

// superseded reports whether another file has been applied for these features since, or one was removed. weir serve does
// not undo that.
func (w *follower) superseded(names []string) bool {
	now := w.host.filesInForce()
	for _, name := range names {
		if now[name] != w.before[name] && now[name] != w.spec.hash {
			return true
		}
	}
	return false
}

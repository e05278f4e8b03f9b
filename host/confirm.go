// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"syscall"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// A change that is to be confirmed is kept beside the records of the pins: what there was before it, and until when it is
// in force. Whoever finds its time over takes it back: the process that the command leaves behind, weir serve, or the
// next weir apply. Both files are written before the change begins.
const (
	keptChange = "change" // Unconfirmed
	keptBefore = "before" // savedHost
)

// Errors about a change that is to be confirmed.
var (
	errUnconfirmed = errors.New("a change waits to be confirmed")
	errNoChange    = errors.New("no change waits to be confirmed")
)

// rollBackRetry is how long after a failed attempt a change is taken back again.
const rollBackRetry = 10 * time.Second

// Unconfirmed is a change that is taken back unless it is confirmed in time.
type Unconfirmed struct {
	ID         string        `json:"id"`
	Since      time.Time     `json:"since"`
	Window     time.Duration `json:"window"`
	Left       time.Duration `json:"left"`                  // negative: over, and nobody has taken it back
	RolledBack time.Time     `json:"rolled_back,omitzero"`  // it was: told until the next change
	ByCommand  bool          `json:"by_command,omitempty"`  // weir rollback took it back, before its time was over
	Problem    string        `json:"problem,omitempty"`     // why it could not be taken back
	Deadline   uint64        `json:"deadline"`              // CLOCK_BOOTTIME, ns
	Retry      uint64        `json:"retry_after,omitempty"` // the same clock: of the next attempt
	Boot       string        `json:"boot"`
}

// savedHost is every feature as it was, by name.
type savedHost map[string]json.RawMessage

// Waits says that the change is in force and may be confirmed.
func (u *Unconfirmed) Waits() bool { return u != nil && u.RolledBack.IsZero() }

// over says that the change is to be taken back now.
func (u *Unconfirmed) over() bool { return u.Waits() && u.Left <= 0 && kernel.Boottime() >= u.Retry }

// begin lets the time of a change begin now.
func (u *Unconfirmed) begin(window time.Duration) {
	u.Window, u.Deadline, u.Left, u.ByCommand = window, kernel.Boottime()+uint64(window), window, false
}

// Finding is what an operator should know of the change.
func (u *Unconfirmed) Finding() feature.Finding {
	f := feature.Finding{Object: "change of " + u.Since.Format(time.TimeOnly)}
	switch {
	case !u.RolledBack.IsZero() && u.ByCommand:
		f.Text = fmt.Sprintf("taken back at %s by weir rollback", u.RolledBack.Format(time.TimeOnly))
		f.Remedy = "nothing is wrong; the next weir apply that changes something ends this note"
	case !u.RolledBack.IsZero():
		f.Text = fmt.Sprintf("taken back at %s: it was not confirmed within %s", u.RolledBack.Format(time.TimeOnly), u.Window)
		f.Remedy = "weir apply again, and weir confirm in time"
	case u.Problem != "":
		f.Text = fmt.Sprintf("not confirmed within %s, and it could not be taken back: %s", u.Window, u.Problem)
		f.Remedy = "fix the reason, then weir rollback; or keep the change: weir confirm"
	case u.Left <= 0:
		f.Text = fmt.Sprintf("not confirmed within %s, and nobody has taken it back for %s", u.Window, (-u.Left).Round(time.Second))
		f.Remedy = "weir rollback, or start weir serve; weir confirm keeps it"
	default:
		f.Text = fmt.Sprintf("taken back in %s unless it is confirmed", u.Left.Round(time.Second))
		f.Remedy = "weir confirm, or weir rollback"
	}
	return f
}

// Unconfirmed returns the change that is to be confirmed, or was taken back; nil if there is none.
func (h *Host) Unconfirmed() (*Unconfirmed, error) {
	text, err := h.Root.Kept(keptChange)
	if err != nil || text == nil {
		return nil, err
	}
	u := &Unconfirmed{}
	if err := json.Unmarshal(text, u); err != nil {
		return nil, fmt.Errorf("the change that is to be confirmed: %w", err)
	}
	if u.Boot != kernel.BootID() {
		return nil, nil // the pins went with the boot
	}
	u.Left = time.Duration(u.Deadline - kernel.Boottime())
	return u, nil
}

// keep writes the change down.
func (u *Unconfirmed) keep(l *kernel.WriteLock) error {
	text, err := json.Marshal(u)
	if err != nil {
		return err
	}
	return l.Keep(keptChange, text)
}

// forgetChange ends what is kept of a change, its own file first: the other means nothing without it.
func forgetChange(l *kernel.WriteLock) error {
	return errors.Join(l.Forget(keptChange), l.Forget(keptBefore))
}

// save reads every feature as it is.
func (h *Host) save(ctx context.Context) (savedHost, error) {
	out := savedHost{}
	for _, f := range features {
		r, ok := f.Value.(feature.Restorer)
		if !ok {
			return nil, fmt.Errorf("%s cannot be put back to what it is: apply without --confirm", f.Name)
		}
		text, err := r.Save(ctx, h.Root)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name, err)
		}
		out[f.Name] = text
	}
	return out, nil
}

// applyUnconfirmed carries out a plan that is taken back unless it is confirmed. before is the change that waits already,
// or nil: what there was before that one is what a take-back leads to.
func (h *Host) applyUnconfirmed(ctx context.Context, l *kernel.WriteLock, window time.Duration, plan feature.Plan, before *Unconfirmed, each func(Done)) error {
	if !before.Waits() {
		before = nil
		saved, err := h.save(ctx)
		if err != nil {
			return err
		}
		text, err := json.Marshal(saved)
		if err != nil {
			return err
		}
		if err := errors.Join(l.Forget(keptChange), l.Keep(keptBefore, text)); err != nil {
			return err
		}
		kernel.Step("host:saved")
	}
	now := time.Now()
	u := &Unconfirmed{ID: fmt.Sprintf("%d-%x", syscall.Getpid(), now.UnixNano()), Since: now, Boot: kernel.BootID()}
	u.begin(window)
	undo := func() error {
		if before != nil {
			return before.keep(l)
		}
		return forgetChange(l)
	}
	if err := u.keep(l); err != nil {
		return errors.Join(err, undo())
	}
	kernel.Step("host:kept")
	if err := h.startWatcher(u.ID); err != nil {
		return errors.Join(err, undo())
	}
	kernel.Step("host:watched")
	err := plan.Apply(ctx, l, func(s feature.Step, note string) { each(Done{s, note}) })
	if errors.Is(err, feature.ErrNotUndone) {
		return fmt.Errorf("%w; what is left of the change is taken back within %s", err, window)
	} else if err != nil {
		return errors.Join(err, undo())
	}
	u.begin(window) // that of a long change begins with its end
	return u.keep(l)
}

// Confirm keeps the change that waits.
func (h *Host) Confirm(ctx context.Context) error {
	l, err := h.Root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	u, err := h.Unconfirmed()
	if err != nil {
		return err
	}
	if !u.Waits() {
		return u.missing()
	}
	return forgetChange(l)
}

// missing says that no change waits.
func (u *Unconfirmed) missing() error {
	if u != nil {
		return fmt.Errorf("%w: that of %s was taken back at %s", errNoChange, u.Since.Format(time.TimeOnly), u.RolledBack.Format(time.TimeOnly))
	}
	return fmt.Errorf("%w: weir apply --confirm makes one", errNoChange)
}

// Rollback takes the change that waits back at once, and calls each after every step.
func (h *Host) Rollback(ctx context.Context, each func(Done)) error {
	return h.rollback(ctx, func(u *Unconfirmed) (bool, error) {
		if !u.Waits() {
			return false, u.missing()
		}
		return true, nil
	}, each)
}

// rollback takes the change back, if due says so under the lock.
func (h *Host) rollback(ctx context.Context, due func(*Unconfirmed) (bool, error), each func(Done)) error {
	l, err := h.Root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	u, err := h.Unconfirmed()
	if err != nil {
		return err
	}
	if now, err := due(u); err != nil || !now {
		return err
	}
	if err := ctx.Err(); err != nil {
		return kernel.Stopped(ctx, err, "nothing was changed")
	}
	if u.Left > 0 { // whoever finds this command dead goes on at once
		u.Deadline, u.Left, u.ByCommand = kernel.Boottime(), 0, true
		if err := u.keep(l); err != nil {
			return err
		}
	}
	return h.rollBack(ctx, l, u, each)
}

// rollBack puts every feature back to what it was. One that cannot be keeps no other from it. Killed at any step, or after
// an error, the next one begins anew from what there is by then.
func (h *Host) rollBack(ctx context.Context, l *kernel.WriteLock, u *Unconfirmed, each func(Done)) error {
	err := h.recover(ctx, l, nil, each)
	if err == nil {
		err = recoverAll(l, nil)
	}
	if err == nil {
		err = h.restore(ctx, l, each)
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return kernel.Stopped(ctx, err, fmt.Sprintf("half done: the change of %s is taken back in part: %s", u.Since.Format(time.TimeOnly), RollbackRemedy))
	} else if err != nil {
		u.Problem, u.Retry = err.Error(), kernel.Boottime()+uint64(rollBackRetry)
		return errors.Join(fmt.Errorf("taking back the change of %s: %w", u.Since.Format(time.TimeOnly), err), u.keep(l))
	}
	kernel.Step("host:restored")
	h.noFile(l, features)
	u.RolledBack, u.Problem, u.Retry = time.Now(), "", 0
	return errors.Join(u.keep(l), l.Forget(keptBefore))
}

// restore carries out what leads back to the saved state.
func (h *Host) restore(ctx context.Context, l *kernel.WriteLock, each func(Done)) error {
	text, err := h.Root.Kept(keptBefore)
	if err != nil {
		return err
	}
	var saved savedHost
	if err := json.Unmarshal(text, &saved); err != nil {
		return fmt.Errorf("what there was before the change: %w", err)
	}
	var errs []error
	for _, f := range features {
		r, ok := f.Value.(feature.Restorer)
		if !ok || saved[f.Name] == nil {
			continue
		}
		plan, err := r.PlanRestore(ctx, h.Root, saved[f.Name])
		for _, w := range plan.Warnings {
			each(Done{Step: feature.Step{Verb: "restore", Object: f.Name}, Note: w})
		}
		if err == nil {
			err = goBack(ctx, l, plan, each)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f.Name, err))
		}
	}
	return errors.Join(errs...)
}

// goBack carries out a plan that leads back. When ctx is done it stops where it is: the next attempt goes on from there, and to
// take back a take-back would lead nowhere.
func goBack(ctx context.Context, l *kernel.WriteLock, plan feature.Plan, each func(Done)) error {
	undo := plan.Undo
	plan.Undo = []func(context.Context, *kernel.WriteLock) error{func(back context.Context, l *kernel.WriteLock) error {
		if ctx.Err() != nil {
			return nil
		}
		return feature.Plan{Undo: undo}.RollBack(back, l)
	}}
	err := plan.Apply(ctx, l, func(s feature.Step, note string) { each(Done{s, note}) })
	if stopped, ok := errors.AsType[*kernel.Interrupted](err); ok {
		return stopped.Err // what became of it is told for all features
	}
	return err
}

// forgetSaved lets nobody bring features back that were removed.
func (h *Host) forgetSaved(l *kernel.WriteLock, some []feature.Declared) error {
	if len(some) == len(features) {
		return forgetChange(l)
	}
	text, err := h.Root.Kept(keptBefore)
	if err != nil || text == nil {
		return err
	}
	var saved savedHost
	if err := json.Unmarshal(text, &saved); err != nil {
		return err
	}
	for _, f := range some {
		delete(saved, f.Name)
	}
	if text, err = json.Marshal(saved); err != nil {
		return err
	}
	return l.Keep(keptBefore, text)
}

// WatchCommand makes the command that runs [Host.Watch] for a change: weir itself. Programs that use this package as a
// library set it, or leave changes to weir serve.
var WatchCommand func(root, id string) *exec.Cmd

// startWatcher leaves a process behind that takes the change back, and waits until it looks.
func (h *Host) startWatcher(id string) error {
	if WatchCommand == nil {
		return nil
	}
	cmd := WatchCommand(h.Root.Path(), id)
	// A session of its own, and nothing of ours open: it outlives the command and its shell.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Dir = "/"
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("starting the process that takes the change back: %w", err)
	}
	defer out.Close()
	if n, _ := io.ReadFull(out, make([]byte, 1)); n != 1 {
		return fmt.Errorf("the process that takes the change back ended: %w; see weir confirm --watch %s", cmd.Wait(), id)
	}
	return cmd.Process.Release()
}

// Watch waits until a change is confirmed, replaced or taken back by others, or takes it back when its time is over. It calls
// ready once it looks.
func (h *Host) Watch(ctx context.Context, id string, ready func()) error {
	for first := true; ; first = false {
		u, err := h.Unconfirmed()
		if err != nil {
			return err
		}
		if !u.Waits() || u.ID != id {
			return nil
		}
		if first {
			ready()
		}
		if u.over() {
			// An error is told by what is kept; weir serve may succeed, or the next attempt.
			err := h.rollback(ctx, func(u *Unconfirmed) (bool, error) { return u.Waits() && u.ID == id && u.over(), nil }, func(Done) {})
			if err == nil {
				continue
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(u.nap()):
		}
	}
}

// nap is how long nothing is due: a second at most, for clocks that stand still and for changes that are confirmed.
func (u *Unconfirmed) nap() time.Duration {
	left := u.Left
	if u.Retry != 0 {
		left = time.Duration(u.Retry - kernel.Boottime())
	}
	return min(max(left, 10*time.Millisecond), time.Second)
}

// watchConfirmation takes changes back whose time is over, until ctx is done. It logs each that was taken back, by whichever process.
func (h *Host) watchConfirmation(ctx context.Context, log feature.Logger) error {
	told := ""
	if u, err := h.Unconfirmed(); err == nil && u != nil && !u.Waits() {
		told = u.ID // before this process began
	}
	for range (feature.Loop{Every: checkEvery, Later: true}).Turns(ctx) {
		u, err := h.Unconfirmed()
		if err == nil && u.over() {
			err = h.rollback(ctx, func(now *Unconfirmed) (bool, error) { u = now; return u.over(), nil }, func(Done) {})
			if err != nil && ctx.Err() == nil {
				log.Warn("unconfirmed change cannot be taken back", "err", err)
			}
		}
		if err != nil || u == nil || u.Waits() || u.ID == told {
			continue
		}
		told = u.ID
		by := "end of its time"
		if u.ByCommand {
			by = "weir rollback"
		}
		log.Warn("unconfirmed change taken back", "since", u.Since.Format(time.TimeOnly), "window", u.Window, "by", by)
	}
	return nil
}

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
	"github.com/weir-project/weir/internal/bigjson"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
)

// A change to be confirmed is kept beside the records of the pins: the state before it, and its deadline. After the
// deadline the first process to notice rolls the change back: the process left behind by the command, weir serve, or the
// next weir apply. Both files are written before the change starts.
const (
	keptChange = "change" // Unconfirmed
	keptBefore = "before" // savedHost
)

// Errors about a change to be confirmed.
var (
	errUnconfirmed = errors.New("a change waits to be confirmed")
	errNoChange    = errors.New("no change waits to be confirmed")
	errNoState     = errors.New("read the state before the change")
)

// rollBackRetry is the delay before a failed rollback is retried.
const rollBackRetry = 10 * time.Second

// Unconfirmed is a change that is rolled back unless it is confirmed in time.
type Unconfirmed struct {
	ID         string        `json:"id"`
	Since      time.Time     `json:"since"`
	Window     time.Duration `json:"window"`
	Left       time.Duration `json:"left"`                  // negative: the time is over, and the change is not rolled back yet
	RolledBack time.Time     `json:"rolled_back,omitzero"`  // time of the rollback, shown until the next change
	ByCommand  bool          `json:"by_command,omitempty"`  // weir rollback rolled it back early
	Problem    string        `json:"problem,omitempty"`     // why the rollback failed
	Deadline   uint64        `json:"deadline"`              // CLOCK_BOOTTIME, ns
	Retry      uint64        `json:"retry_after,omitempty"` // time of the next attempt, by the same clock
	Boot       string        `json:"boot"`
	Damaged    string        `json:"damaged,omitempty"` // file of an unreadable change, with the reason; nothing else is known
}

// savedHost holds the saved state of every feature, by name.
type savedHost map[string]json.RawMessage

// keep writes the saved state. It rejects a state that restore would reject.
func (s savedHost) keep(l *kernel.WriteLock) error {
	for name, text := range s {
		if err := bigjson.Check(text); err != nil {
			return fmt.Errorf("%s has %w: apply without --confirm", name, err)
		}
	}
	text, err := json.Marshal(s)
	if err == nil {
		err = l.KeepLarge(keptBefore, func(w io.Writer) error { _, err := w.Write(text); return err })
	}
	return err
}

// Waits reports whether the change is in force and may be confirmed.
func (u *Unconfirmed) Waits() bool { return u != nil && u.Damaged == "" && u.RolledBack.IsZero() }

// over reports whether the change is due for a rollback.
func (u *Unconfirmed) over() bool { return u.Waits() && u.Left <= 0 && kernel.Boottime() >= u.Retry }

// begin starts the confirmation time now.
func (u *Unconfirmed) begin(window time.Duration) {
	u.Window, u.Deadline, u.Left, u.ByCommand = window, kernel.Boottime()+uint64(window), window, false
}

// Finding describes the change for an operator.
func (u *Unconfirmed) Finding() feature.Finding {
	f := feature.Finding{Object: "change of " + u.Since.Format(time.TimeOnly)}
	switch {
	case u.Damaged != "":
		f.Object = "unconfirmed change"
		f.Text = "is unreadable, so nothing rolls it back: " + u.Damaged
		f.Remedy = "run weir apply with the file that you want in force: it removes the unreadable one"
	case !u.RolledBack.IsZero() && u.ByCommand:
		f.Text = fmt.Sprintf("rolled back at %s by weir rollback", u.RolledBack.Format(time.TimeOnly))
		f.Remedy = "no action is needed; the next change by weir apply removes this note"
	case !u.RolledBack.IsZero():
		f.Text = fmt.Sprintf("rolled back at %s: not confirmed within %s", u.RolledBack.Format(time.TimeOnly), u.Window)
		f.Remedy = "run weir apply again, and weir confirm in time"
	case u.Problem != "":
		f.Text = fmt.Sprintf("not confirmed within %s, and the rollback failed: %s", u.Window, u.Problem)
		f.Remedy = "fix the reason and run weir rollback, or keep the change with weir confirm"
	case u.Left <= 0:
		f.Text = fmt.Sprintf("not confirmed within %s, and its rollback is overdue by %s", u.Window, (-u.Left).Round(time.Second))
		f.Remedy = "run weir rollback or start weir serve; weir confirm keeps the change"
	default:
		f.Text = fmt.Sprintf("rolled back in %s unless it is confirmed", u.Left.Round(time.Second))
		f.Remedy = "run weir confirm or weir rollback"
	}
	return f
}

// Unconfirmed returns the change to be confirmed, or the last rolled-back one; nil if there is none.
func (h *Host) Unconfirmed() (*Unconfirmed, error) {
	text, err := h.Root.Kept(keptChange)
	if unreadable(err) || err == nil && text == nil {
		return nil, err
	}
	u := &Unconfirmed{}
	if err == nil {
		err = json.Unmarshal(text, u)
	}
	if err != nil {
		return &Unconfirmed{Damaged: printable.OneLine(fmt.Sprintf("%s: %v", h.Root.KeptPath(keptChange), err))}, nil
	}
	// The owner of the records writes this file. Only a reader reports damage, and no text begins a line.
	u.Damaged, u.Problem = "", printable.OneLine(u.Problem)
	if u.Boot != kernel.BootID() {
		return nil, nil // the pins ended with the previous boot
	}
	u.Left = time.Duration(u.Deadline - kernel.Boottime())
	return u, nil
}

// keep writes the change.
func (u *Unconfirmed) keep(l *kernel.WriteLock) error {
	text, err := json.Marshal(u)
	if err != nil {
		return err
	}
	return l.Keep(keptChange, text)
}

// forgetChange removes the kept change. Its own file goes first, because the saved state is meaningless without it.
func forgetChange(l *kernel.WriteLock) error {
	return errors.Join(l.Forget(keptChange), l.Forget(keptBefore))
}

// save saves the state of every feature.
func (h *Host) save(ctx context.Context) (savedHost, error) {
	out := savedHost{}
	for _, f := range features {
		r, ok := f.Value.(feature.Restorer)
		if !ok {
			return nil, fmt.Errorf("%s cannot be restored later: apply without --confirm", f.Name)
		}
		text, err := r.Save(ctx, h.Root)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name, err)
		}
		out[f.Name] = text
	}
	h.saveGroup(out)
	return out, nil
}

// applyUnconfirmed applies a plan that is rolled back unless it is confirmed. before is the change already waiting, or
// nil: a rollback then leads to the state before that one.
func (h *Host) applyUnconfirmed(ctx context.Context, l *kernel.WriteLock, window time.Duration, plan feature.Plan, before *Unconfirmed, each func(Done)) error {
	if !before.Waits() {
		before = nil
		saved, err := h.save(ctx)
		if err != nil {
			return err
		}
		if err := errors.Join(l.Forget(keptChange), saved.keep(l)); err != nil {
			return fmt.Errorf("save the present state for a rollback, so nothing was changed: %w", err)
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
		return fmt.Errorf("%w; the rest of the change is rolled back within %s", err, window)
	} else if err != nil {
		return errors.Join(err, undo())
	}
	u.begin(window) // the time of a long change starts at its end
	return u.keep(l)
}

// Confirm keeps the waiting change.
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
	if err := l.Forget(keptChange); err != nil {
		return fmt.Errorf("the change is not confirmed: %w", err)
	}
	h.warnIf("the change is confirmed", l.Forget(keptBefore))
	return nil
}

// missing returns the error for a missing change.
func (u *Unconfirmed) missing() error {
	switch {
	case u != nil && u.Damaged != "":
		f := u.Finding()
		return fmt.Errorf("%w: it %s: %s", errNoChange, f.Text, f.Remedy)
	case u != nil:
		return fmt.Errorf("%w: the change of %s was rolled back at %s", errNoChange, u.Since.Format(time.TimeOnly), u.RolledBack.Format(time.TimeOnly))
	}
	return fmt.Errorf("%w: weir apply --confirm makes one", errNoChange)
}

// Rollback rolls the waiting change back at once. It calls each after every step.
func (h *Host) Rollback(ctx context.Context, each func(Done)) error {
	return h.rollback(ctx, func(u *Unconfirmed) (bool, error) {
		if !u.Waits() {
			return false, u.missing()
		}
		return true, nil
	}, each)
}

// rollback rolls the change back if due returns true under the lock.
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
	if u.Left > 0 { // if this command dies, the next process continues at once
		u.Deadline, u.Left, u.ByCommand = kernel.Boottime(), 0, true
		if err := u.keep(l); err != nil {
			return err
		}
	}
	return h.rollBack(ctx, l, u, each)
}

// rollBack restores every feature to its saved state. A failure of one feature does not stop the others. After a kill or
// an error the next attempt starts from the state of that time.
func (h *Host) rollBack(ctx context.Context, l *kernel.WriteLock, u *Unconfirmed, each func(Done)) error {
	err := h.recover(ctx, l, nil, each)
	if err == nil {
		err = recoverAll(l, nil)
	}
	if err == nil {
		err = h.restore(ctx, l, each)
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return kernel.Stopped(ctx, err, fmt.Sprintf("half done: the change of %s is rolled back in part: %s", u.Since.Format(time.TimeOnly), RollbackRemedy))
	} else if err != nil {
		u.Problem, u.Retry = printable.OneLine(err.Error()), kernel.Boottime()+uint64(rollBackRetry)
		return errors.Join(fmt.Errorf("roll back the change of %s: %w", u.Since.Format(time.TimeOnly), err), u.keep(l))
	}
	kernel.Step("host:restored")
	h.noFile(l, features)
	u.RolledBack, u.Problem, u.Retry = time.Now(), "", 0
	h.warnIf("the change is rolled back", l.Forget(keptBefore))
	return u.keep(l)
}

// openSaved opens the saved state and finds its members; nil if there is none. The owner of the records may have made it
// large, so each member is read when it is needed.
func (h *Host) openSaved() (saved *bigjson.Object, closeFile func(), err error) {
	f, size, err := h.Root.KeptLarge(keptBefore)
	if err != nil || f == nil {
		return nil, func() {}, err
	}
	saved, err = bigjson.Read(f, size)
	return saved, func() { f.Close() }, err
}

// restore applies the plans that lead to the saved state.
func (h *Host) restore(ctx context.Context, l *kernel.WriteLock, each func(Done)) error {
	saved, closeFile, err := h.openSaved()
	defer closeFile()
	if unreadable(err) {
		return err
	}
	if err == nil && saved == nil {
		err = errors.New("the file is gone")
	}
	if err != nil {
		return fmt.Errorf("%w, %s: %w: weir confirm keeps the change", errNoState, h.Root.KeptPath(keptBefore), err)
	}
	var errs []error
	for _, f := range features {
		if err := h.restoreFeature(ctx, l, f, saved, each); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f.Name, err))
		}
	}
	return errors.Join(append(errs, h.restoreGroup(ctx, l, saved, each))...)
}

func (h *Host) restoreFeature(ctx context.Context, l *kernel.WriteLock, f feature.Declared, saved *bigjson.Object, each func(Done)) error {
	r, ok := f.Value.(feature.Restorer)
	if !ok {
		return nil
	}
	text, err := saved.Get(f.Name)
	if err != nil {
		return fmt.Errorf("%w, %s: %w: weir confirm keeps the change", errNoState, h.Root.KeptPath(keptBefore), err)
	} else if text == nil {
		return nil
	}
	plan, err := r.PlanRestore(ctx, h.Root, text)
	for _, w := range plan.Warnings {
		each(Done{Step: feature.Step{Verb: "restore", Object: f.Name}, Note: w})
	}
	if err == nil {
		err = goBack(ctx, l, plan, each)
	}
	return err
}

// goBack applies a plan of a rollback. When ctx is done it stops without undoing: the next attempt continues from there.
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
		return stopped.Err // the outcome is reported for all features together
	}
	return err
}

// forgetSaved prevents a rollback from restoring removed features.
func (h *Host) forgetSaved(l *kernel.WriteLock, some []feature.Declared) error {
	if len(some) == len(features) {
		return forgetChange(l)
	}
	saved, closeFile, err := h.openSaved()
	defer closeFile()
	if unreadable(err) || err == nil && saved == nil {
		return err
	}
	if err != nil {
		return nil //nolint:nilerr // a rollback restores nothing from it, and names the file
	}
	names := map[string]bool{}
	for _, f := range some {
		names[f.Name] = true
	}
	return l.KeepLarge(keptBefore, func(w io.Writer) error { return saved.Without(w, names) })
}

// WatchCommand returns the command that runs [Host.Watch] for a change: weir itself. Programs with this package as a
// library set it, or leave changes to weir serve.
var WatchCommand func(root, id string) *exec.Cmd

// startWatcher starts a process to roll the change back later, and waits until it watches.
func (h *Host) startWatcher(id string) error {
	if WatchCommand == nil {
		return nil
	}
	cmd := WatchCommand(h.Root.Path(), id)
	// It has its own session and no descriptor of ours: it survives the command and its shell.
	cmd.SysProcAttr = users.OwnProgram()
	cmd.Dir = "/"
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("start the rollback process: %w", err)
	}
	defer out.Close()
	if n, _ := io.ReadFull(out, make([]byte, 1)); n != 1 {
		return fmt.Errorf("the rollback process ended: %w; see weir confirm --watch %s", cmd.Wait(), id)
	}
	return cmd.Process.Release()
}

// Watch waits until a change is confirmed, replaced or rolled back, or rolls it back after its deadline. It calls ready
// once it watches.
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
			// The kept change holds the error. weir serve or the next attempt may succeed.
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

// nap returns the time until something is due, at most 1 s: the clock may jump, and the change may be confirmed.
func (u *Unconfirmed) nap() time.Duration {
	left := u.Left
	if u.Retry != 0 {
		left = time.Duration(u.Retry - kernel.Boottime())
	}
	return min(max(left, 10*time.Millisecond), time.Second)
}

// watchConfirmation rolls changes back after their deadline until ctx is done. It logs each rollback, by any process.
func (h *Host) watchConfirmation(ctx context.Context, log feature.Logger) error {
	told := ""
	if u, err := h.Unconfirmed(); err == nil && u != nil && !u.Waits() {
		told = u.ID // rolled back before this process started
	}
	for range (feature.Loop{Every: checkEvery, Later: true}).Turns(ctx) {
		u, err := h.Unconfirmed()
		if u != nil && u.Damaged != "" {
			if told != u.Damaged {
				told = u.Damaged
				log.Warn("unconfirmed change unreadable, not rolled back", "err", u.Damaged)
			}
			continue
		}
		if err == nil && u.over() {
			err = h.rollback(ctx, func(now *Unconfirmed) (bool, error) { u = now; return u.over(), nil }, func(Done) {})
			if err != nil && ctx.Err() == nil {
				log.Warn("unconfirmed change not rolled back", "err", err)
			}
		}
		if err != nil || u == nil || u.Waits() || u.ID == told {
			continue
		}
		told = u.ID
		by := "timeout"
		if u.ByCommand {
			by = "weir rollback"
		}
		log.Warn("unconfirmed change rolled back", "since", u.Since.Format(time.TimeOnly), "window", u.Window, "by", by)
	}
	return nil
}

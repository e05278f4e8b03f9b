// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

// keptUnderway is the note of a change with steps under way. Only a killed command leaves it.
const keptUnderway = "underway"

// HalfDone is a change by a killed weir apply or weir remove. Each object is complete, and some of the file's are missing
// or not removed.
type HalfDone struct {
	Since   time.Time `json:"since"`
	Boot    string    `json:"boot"`
	Removal bool      `json:"removal,omitempty"` // by weir remove
	Damaged string    `json:"damaged,omitempty"` // file of an unreadable note, with the reason; nothing else is known
}

// Finding describes the change for doctor and status.
func (d *HalfDone) Finding() feature.Finding {
	f := feature.Finding{Object: "change of " + d.Since.Format(time.TimeOnly)}
	switch {
	case d.Damaged != "":
		f.Object = "note of a change"
		f.Text = "is unreadable, so a change may be half done: " + d.Damaged
		f.Remedy = "run weir apply again: it finishes the change and removes the note"
	case d.Removal:
		f.Text, f.Remedy = "half done, because weir remove was killed", RemoveRemedy
	default:
		f.Text, f.Remedy = "half done, because weir apply was killed", "run weir apply again to finish it, or apply the previous file"
	}
	return f
}

// underway makes the steps of a change. It notes them, because a kill may leave a part of them. The note is optional: a
// full disk must not prevent a change.
func (h *Host) underway(l *kernel.WriteLock, removal bool, steps func() error) error {
	if text, err := json.Marshal(HalfDone{Since: time.Now(), Boot: kernel.BootID(), Removal: removal}); err == nil {
		_ = l.Keep(keptUnderway, text)
	}
	err := steps()
	stopped, ok := errors.AsType[*kernel.Interrupted](err)
	if !errors.Is(err, feature.ErrNotUndone) && !(ok && stopped.HalfDone()) {
		h.ended(l)
	}
	return err
}

// removing makes the steps of a removal, as underway does. It keeps the note of a killed weir apply, because a removal
// finishes none.
func (h *Host) removing(l *kernel.WriteLock, steps func() error) error {
	if left, err := h.noteUnderway(); err == nil && left != nil && !left.Removal {
		return steps()
	}
	return h.underway(l, true, steps)
}

// ended removes the note of a change: none is half done any more.
func (h *Host) ended(l *kernel.WriteLock) { _ = l.Forget(keptUnderway) }

// HalfDone returns a change by a killed command, or nil. A change in progress holds the lock.
func (h *Host) HalfDone() (*HalfDone, error) {
	d, err := h.noteUnderway()
	if err != nil || d == nil || h.Root.Locked() {
		return nil, err
	}
	return h.noteUnderway() // nil if it ended between the note and the lock
}

// noteUnderway returns the note of a change in progress or half done, or nil.
func (h *Host) noteUnderway() (*HalfDone, error) {
	text, err := h.Root.Kept(keptUnderway)
	if unreadable(err) || err == nil && text == nil {
		return nil, err
	}
	d := &HalfDone{}
	if err == nil {
		err = json.Unmarshal(text, d)
	}
	if err != nil {
		return &HalfDone{Damaged: printable.OneLine(fmt.Sprintf("%s: %v", h.Root.KeptPath(keptUnderway), err))}, nil
	}
	d.Damaged = "" // only a reader reports damage
	if d.Boot != kernel.BootID() {
		return nil, nil // the pins ended with the previous boot
	}
	return d, nil
}

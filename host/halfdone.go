// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// keptUnderway is the note of a change with steps under way. Only a killed command leaves it.
const keptUnderway = "underway"

// HalfDone is a change by a killed weir apply. Each object is complete, and some of the file's are missing.
type HalfDone struct {
	Since time.Time `json:"since"`
	Boot  string    `json:"boot"`
}

// Finding describes the change for doctor and status.
func (d *HalfDone) Finding() feature.Finding {
	return feature.Finding{Object: "change of " + d.Since.Format(time.TimeOnly), Text: "half done, because weir apply was killed", Remedy: "run weir apply again to finish it, or apply the previous file"}
}

// underway makes the steps of a change. It notes them, because a kill may leave a part of them. The note is optional: a
// full disk must not prevent a change.
func (h *Host) underway(l *kernel.WriteLock, steps func() error) error {
	if text, err := json.Marshal(HalfDone{time.Now(), kernel.BootID()}); err == nil {
		_ = l.Keep(keptUnderway, text)
	}
	err := steps()
	if !errors.Is(err, feature.ErrNotUndone) {
		h.ended(l)
	}
	return err
}

// ended removes the note of a change: none is half done any more.
func (h *Host) ended(l *kernel.WriteLock) { _ = l.Forget(keptUnderway) }

// HalfDone returns a change by a killed command, or nil. A change in progress holds the lock.
func (h *Host) HalfDone() (*HalfDone, error) {
	text, err := h.Root.Kept(keptUnderway)
	if err != nil || text == nil || h.Root.Locked() {
		return nil, err
	}
	d := &HalfDone{}
	if err := json.Unmarshal(text, d); err != nil {
		return nil, fmt.Errorf("read the note of a change: %w", err)
	}
	if d.Boot != kernel.BootID() {
		return nil, nil // the pins ended with the previous boot
	}
	if again, err := h.Root.Kept(keptUnderway); err != nil || again == nil {
		return nil, err // it ended between the note and the lock
	}
	return d, nil
}

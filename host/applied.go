// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"time"

	"github.com/weir-project/weir/kernel"
)

// keptApplied is the name of the file about the last apply.
const keptApplied = "applied"

// applied says which file is in force, and what became of the last apply.
type applied struct {
	Hash    string    `json:"hash"`    // SHA-256 of the last file that was applied whole, in hex; "": none was
	Time    time.Time `json:"time"`    // of the last apply
	Success bool      `json:"success"` // whether it was applied
	Boot    string    `json:"boot"`
}

// readApplied returns what is known of the last apply since the boot; nil if there was none.
func (h *Host) readApplied() (*applied, error) {
	text, err := h.Root.Kept(keptApplied)
	if err != nil || text == nil {
		return nil, err
	}
	a := &applied{}
	if err := json.Unmarshal(text, a); err != nil {
		return nil, err
	}
	if a.Boot != kernel.BootID() {
		return nil, nil // the pins went with the boot
	}
	return a, nil
}

// noteApplied keeps the outcome of an apply. It is an aid: where nothing can be written, the warning about records tells.
func (h *Host) noteApplied(l *kernel.WriteLock, c *Config, outcome error) {
	a, err := h.readApplied()
	if err != nil || a == nil {
		a = &applied{}
	}
	a.Time, a.Success, a.Boot = time.Now(), outcome == nil, kernel.BootID()
	if outcome == nil {
		a.Hash = c.hash
	}
	if text, err := json.Marshal(a); err == nil {
		_ = l.Keep(keptApplied, text)
	}
}

// noFile notes that no file is in force as a whole any more: something was removed or taken back.
func (h *Host) noFile(l *kernel.WriteLock) {
	if err := l.Forget(keptApplied); err != nil {
		_ = l.Keep(keptApplied, []byte("{}")) // as in noteApplied
	}
}

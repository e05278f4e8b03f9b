// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"maps"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
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
	// Files are the hashes of the files applied last, by the network namespace of the command and feature: weir serve in several
	// namespaces may share a root. A feature that was removed has none.
	Files map[string]map[string]string `json:"files,omitempty"`
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
		a.noteFiles(c)
	}
	if text, err := json.Marshal(a); err == nil {
		_ = l.Keep(keptApplied, text)
	}
}

// noteUnread keeps that a file of weir serve could not be read at a reload: to those who watch the metrics that is an apply that
// failed.
func (h *Host) noteUnread(ctx context.Context, outcome error) {
	l, err := h.Root.Lock(ctx)
	if err != nil {
		return // an aid, as noteApplied
	}
	defer l.Unlock()
	h.noteApplied(l, nil, outcome)
}

// noteFiles notes that the features of a file are in force.
func (a *applied) noteFiles(c *Config) {
	here, err := currentScope()
	if err != nil {
		return // an aid, as noteApplied
	}
	if a.Files == nil {
		a.Files = map[string]map[string]string{}
	}
	maps.DeleteFunc(a.Files, func(scope string, _ map[string]string) bool { return netns.Gone(scope, 0) })
	if a.Files[here] == nil {
		a.Files[here] = map[string]string{}
	}
	for _, f := range featuresOnly(c.Only) {
		a.Files[here][f.Name] = c.hash
	}
}

// filesInForce are the hashes of the files in force that were applied in this network namespace, by feature. It is empty where
// nobody knows.
func (h *Host) filesInForce() map[string]string {
	a, err := h.readApplied()
	here, herr := currentScope()
	if err != nil || herr != nil || a == nil {
		return nil
	}
	return a.Files[here]
}

// currentScope is the scope of the caller's network namespace.
func currentScope() (string, error) {
	ns, err := netns.Current()
	if err != nil {
		return "", err
	}
	defer ns.Close()
	return kernel.ScopeOf(ns), nil
}

// noFile notes that no file is in force as a whole any more: these features were removed or taken back.
func (h *Host) noFile(l *kernel.WriteLock, some []feature.Declared) {
	if a, err := h.readApplied(); len(some) < len(features) && err == nil && a != nil {
		maps.DeleteFunc(a.Files, func(_ string, files map[string]string) bool {
			for _, f := range some {
				delete(files, f.Name)
			}
			return len(files) == 0
		})
		if text, err := json.Marshal(applied{Boot: a.Boot, Files: a.Files}); err == nil && len(a.Files) > 0 {
			_ = l.Keep(keptApplied, text) // as in noteApplied
			return
		}
	}
	if err := l.Forget(keptApplied); err != nil {
		_ = l.Keep(keptApplied, []byte("{}")) // as in noteApplied
	}
}

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

// keptApplied is the name of the kept text about the last apply.
const keptApplied = "applied"

// applied describes the file in force and the last apply.
type applied struct {
	Hash    string    `json:"hash"`    // SHA-256 in hex of the last completely applied file; "": none
	Time    time.Time `json:"time"`    // of the last apply
	Success bool      `json:"success"` // whether it succeeded
	Boot    string    `json:"boot"`
	// Files are the hashes of the last applied files, by network namespace of the command and then by feature, because
	// several weir serve processes in different namespaces may share a root. A removed feature has no hash.
	Files map[string]map[string]string `json:"files,omitempty"`
}

// readApplied returns the record of the last apply since boot, or nil if there was none.
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
		return nil, nil // the pins ended with the previous boot
	}
	return a, nil
}

// noteApplied records the outcome of an apply. The record is optional: a write error is ignored here, and reported by
// the warning about instance records.
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

// noteUnread records a failed reload of weir serve's unreadable file. In the metrics it counts as a failed apply.
func (h *Host) noteUnread(ctx context.Context, outcome error) {
	l, err := h.Root.Lock(ctx)
	if err != nil {
		return // optional, like noteApplied
	}
	defer l.Unlock()
	h.noteApplied(l, nil, outcome)
}

// noteFiles records that the features of a file are in force.
func (a *applied) noteFiles(c *Config) {
	here, err := currentScope()
	if err != nil {
		return // optional, like noteApplied
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

// filesInForce returns the hashes of the files in force in this network namespace, by feature. It is empty if unknown.
func (h *Host) filesInForce() map[string]string {
	a, err := h.readApplied()
	here, herr := currentScope()
	if err != nil || herr != nil || a == nil {
		return nil
	}
	return a.Files[here]
}

// currentScope returns the scope of the caller's network namespace.
func currentScope() (string, error) {
	ns, err := netns.Current()
	if err != nil {
		return "", err
	}
	defer ns.Close()
	return kernel.ScopeOf(ns), nil
}

// noFile records that no complete file is in force any more, because these features were removed or rolled back.
func (h *Host) noFile(l *kernel.WriteLock, some []feature.Declared) {
	if a, err := h.readApplied(); len(some) < len(features) && err == nil && a != nil {
		maps.DeleteFunc(a.Files, func(_ string, files map[string]string) bool {
			for _, f := range some {
				delete(files, f.Name)
			}
			return len(files) == 0
		})
		if text, err := json.Marshal(applied{Boot: a.Boot, Files: a.Files}); err == nil && len(a.Files) > 0 {
			_ = l.Keep(keptApplied, text) // optional, like noteApplied
			return
		}
	}
	if err := l.Forget(keptApplied); err != nil {
		_ = l.Keep(keptApplied, []byte("{}")) // optional, like noteApplied
	}
}

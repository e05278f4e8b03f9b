// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/feature/reroute/links"
)

// An orphan is a link with a lost session: the session was not deleted on purpose, but ended with bfdd or with the
// process running it. The restart of a daemon must not put a dead link back into use. So the link keeps its verdict
// until a new session takes it over, and revises it once it is up. [Engine.GiveBack] ends the wait.

// hasBeenUp is BFD_HAS_BEEN_UP of bfd.h. A session with it that is down has found its link dead.
const hasBeenUp = 1

// Lost ends sessions as Delete does, and orphans their links.
func (e *Engine) Lost(discriminators ...uint32) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	linked, err := e.end(discriminators)
	e.orphan(linked...)
	return err
}

// Orphan marks links possibly left with a verdict by an earlier process.
func (e *Engine) Orphan(ifindexes ...int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.orphan(ifindexes...)
}

func (e *Engine) orphan(ifindexes ...int) {
	if e.orphans == nil {
		e.orphans = map[int]time.Time{}
	}
	for _, i := range ifindexes {
		e.orphans[i] = time.Now()
	}
}

// GiveBack clears the verdict of links orphaned for at least after.
func (e *Engine) GiveBack(after time.Duration) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.orphans) == 0 {
		return nil
	}
	err := e.each(func(_ uint32, c *bpf.BfdBfdSetup) { delete(e.orphans, int(c.Link)) })
	if err != nil {
		return err
	}
	var over []int
	for i, since := range e.orphans {
		if time.Since(since) >= after {
			over = append(over, i)
			delete(e.orphans, i)
		}
	}
	return e.unlink(over...)
}

// inherits reports whether a new session takes over its link's verdict. Only sessions of bfdd can leave one.
func (e *Engine) inherits(s *Session) (bool, error) {
	if e.unpinned == nil || s.Link == 0 {
		return false, nil
	}
	var w links.State
	if err := e.maps[links.MapName].Lookup(links.Slot(s.Link), &w); err != nil {
		return false, fmt.Errorf("reading the link of the session with %s: %w", s.Peer, err)
	}
	return w.Reasons()&links.Probe != 0, nil
}

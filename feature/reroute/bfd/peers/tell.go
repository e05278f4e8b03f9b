// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/kernel"
)

// told logs the up and down verdicts of a namespace's configured sessions. It lives as long as Run, so a reopened
// engine continues with the logged state.
type told struct {
	r     *kernel.Root
	scope string
	log   feature.Logger
	mu    sync.Mutex      // serializes checks, so an older verdict cannot be logged last
	up    map[uint32]bool // last logged verdict by discriminator
}

// changes logs changes at once while the engine is open.
func (t *told) changes(ctx context.Context, e *engine.Engine) {
	err := e.Changes(ctx, func(d uint32) bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		if st, there, err := e.Status(d); err == nil && there { // after a removal, the command has reported it
			t.compare(d, st)
		}
		return true
	})
	if err != nil && ctx.Err() == nil {
		t.log.Warn("changes of BFD sessions are logged late", "err", err)
	}
}

// all logs verdicts missed by changes: from before its start, of sessions without a recorded name yet, and of events
// lost in the kernel. It reads the pins, so it works without an open engine.
func (t *told) all() {
	t.mu.Lock()
	defer t.mu.Unlock()
	found, err := engine.Published{Scope: t.scope}.Sessions(t.r)
	if err != nil {
		return // removed, or readable the next time
	}
	maps.DeleteFunc(t.up, func(d uint32, _ bool) bool { _, there := found[d]; return !there })
	for d, st := range found {
		t.compare(d, st)
	}
}

// compare logs a verdict different from the last logged one. Sessions never up have none.
func (t *told) compare(d uint32, st engine.Status) {
	up := st.State == bfd.Up
	if was, said := t.up[d]; said && was == up || !said && !up && st.Ups == 0 && !st.LinkDown {
		return
	}
	s, netns, known := t.session(d)
	if !known {
		return // sessions start before their names are recorded; all retries
	}
	t.up[d] = up
	args := []any{"path", s.Name, "interface", s.Device, "peer", s.Peer}
	if netns != "" {
		args = append(args, "netns", netns)
	}
	logVerdict(t.log, st, args)
}

// logVerdict logs a session up or down. args name the session.
func logVerdict(log feature.Logger, st engine.Status, args []any) {
	if ago := time.Duration(kernel.Monotonic()) - st.Since; ago > late {
		args = append(args, "at", time.Now().Add(-ago).Format(time.RFC3339Nano))
	}
	if st.State == bfd.Up {
		if !st.Polling { // else they will change: both ends start slowly
			args = append(args, "interval", st.Interval, "detection", st.Detection)
		}
		log.Info("BFD session is up", args...)
		return
	}
	if st.Ups == 0 {
		log.Warn("BFD session is not up again, and its link stays down", append(args, "err", "its device was recreated, or its addresses changed")...)
		return
	}
	log.Warn("BFD session is down", append(args, "err", st.Diag, "peer_says", fmt.Sprintf("%s, %s", st.Remote.State, st.Remote.Diag))...)
}

// late is the age from which a change's own time is logged.
const late = time.Second

// session returns the configured session of a discriminator and its namespace; false: it is not recorded, perhaps not
// yet.
func (t *told) session(d uint32) (s Session, netns string, known bool) {
	all, _, _, err := readPublished(t.r)
	if err != nil {
		return s, "", false
	}
	p := all[t.scope]
	i := slices.IndexFunc(p.Config.Sessions, func(s Session) bool { return p.Discriminators[s.Name] == d })
	if i < 0 {
		return s, "", false
	}
	return p.Config.Sessions[i], p.Netns, true
}

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

// told logs which sessions of a namespace's configuration come up and are up no longer. It is there for as long as Run is: who opens
// the engine anew goes on with what was told before.
type told struct {
	r     *kernel.Root
	scope string
	log   feature.Logger
	mu    sync.Mutex      // of one look at a time, or an older one could be told last
	up    map[uint32]bool // by discriminator, of those that were told of
}

// changes tells of changes at once, as long as the engine is open.
func (t *told) changes(ctx context.Context, e *engine.Engine) {
	err := e.Changes(ctx, func(d uint32) bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		if st, there, err := e.Status(d); err == nil && there { // removed: who did it knows
			t.compare(d, st)
		}
		return true
	})
	if err != nil && ctx.Err() == nil {
		t.log.Warn("changes of BFD sessions are told of late", "err", err)
	}
}

// all tells of what changes has not: what was so before anybody listened, sessions whose names were not known yet, and notices
// that the kernel had no room for. It reads the pins, which are there whether or not the engine can be opened.
func (t *told) all() {
	t.mu.Lock()
	defer t.mu.Unlock()
	found, err := engine.Published{Scope: t.scope}.Sessions(t.r)
	if err != nil {
		return // removed, or read the next time
	}
	maps.DeleteFunc(t.up, func(d uint32, _ bool) bool { _, there := found[d]; return !there })
	for d, st := range found {
		t.compare(d, st)
	}
}

// compare compares a session with what was told of it. Of one that never was up there is nothing to tell.
func (t *told) compare(d uint32, st engine.Status) {
	up := st.State == bfd.Up
	if was, said := t.up[d]; said && was == up || !said && !up && st.Ups == 0 && !st.LinkDown {
		return
	}
	s, netns, known := t.session(d)
	if !known {
		return // sessions begin before it is recorded which they are: all comes back to it
	}
	t.up[d] = up
	args := []any{"path", s.Name, "interface", s.Device, "peer", s.Peer}
	if netns != "" {
		args = append(args, "netns", netns)
	}
	logVerdict(t.log, st, args)
}

// logVerdict logs that a session is up, or down; args name it.
func logVerdict(log feature.Logger, st engine.Status, args []any) {
	if ago := time.Duration(kernel.Monotonic()) - st.Since; ago > late {
		args = append(args, "at", time.Now().Add(-ago).Format(time.RFC3339Nano))
	}
	if st.State == bfd.Up {
		if !st.Polling { // else they are about to change: both ends have begun slowly
			args = append(args, "interval", st.Interval, "detection", st.Detection)
		}
		log.Info("BFD session is up", args...)
		return
	}
	if st.Ups == 0 {
		log.Warn("BFD session is not up again, and its link stays down", append(args, "reason", "its device was made anew, or its addresses changed")...)
		return
	}
	log.Warn("BFD session is down", append(args, "reason", st.Diag, "peer_says", fmt.Sprintf("%s, %s", st.Remote.State, st.Remote.Diag))...)
}

// late is after how long a change's own time is worth telling.
const late = time.Second

// session is what is configured of a discriminator, and in which namespace; false: that is not recorded, or not yet.
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

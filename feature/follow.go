// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// lookEvery is how often a Follower looks for interfaces that came or went;
// lookAgain is after how many of these looks it looks at everything, also where
// nothing tells of a change: somebody may have flushed a ruleset.
const (
	lookEvery = time.Second
	lookAgain = 10
)

// Follower has what a feature pinned attached, in weir serve, to interfaces that
// come, within a second, and lets go of those that went and of namespaces that are
// gone. Traffic needs none of it.
type Follower struct {
	Feature string // whose instances, and the noun for one of them
	// Lacks says whether an instance lacks a place that is there now, or is to be
	// removed. It reads only. It calls watch for each namespace whose interfaces, when
	// they change, are a reason to ask again.
	Lacks func(r *kernel.Root, i kernel.Instance, watch func(ref string, id netns.ID)) (bool, error)
	// Adopt attaches an instance where it is lacking, or removes it, and says what it
	// did: "attached to …".
	Adopt func(l *kernel.WriteLock, i kernel.Instance) (did string, err error)
}

// Run follows until ctx is done.
func (f Follower) Run(ctx context.Context, r *kernel.Root, log Logger) error {
	w := &following{Follower: f, root: r, log: log, failed: map[kernel.Instance]time.Time{}}
	for turn := range (Loop{Every: lookEvery, Root: r, Gather: true}).Turns(ctx) {
		if turn.N%lookAgain != 0 && !turn.Changed && !w.changed() {
			continue
		}
		if err := w.follow(ctx); err != nil && ctx.Err() == nil {
			log.Warn(f.Feature+"s cannot be looked after", "err", err)
		}
	}
	return nil
}

// following is what a Follower knows from one look to the next.
type following struct {
	Follower
	root   *kernel.Root
	log    Logger
	said   Reported[kernel.Instance] // what was last done to each
	unread Reported[kernel.Instance] // why each cannot be looked after
	failed map[kernel.Instance]time.Time
	seen   map[netns.ID]watched
}

// watched is a namespace and its interfaces when they were last looked at.
type watched struct {
	ref     string
	devices string
}

// changed says whether interfaces may be others than at the last look. It costs
// one listing of interfaces for each namespace.
func (w *following) changed() bool {
	for id, n := range w.seen {
		if interfacesText(n.ref, id) != n.devices {
			return true
		}
	}
	return false
}

// interfacesText is a namespace's interfaces in a text that changes with them.
func interfacesText(ref string, id netns.ID) string {
	ns, err := netns.Find(ref, id)
	if err != nil {
		return err.Error()
	}
	defer ns.Close()
	var out strings.Builder
	err = ns.Do(func() error {
		all, err := netlink.LinkList()
		for _, l := range all {
			fmt.Fprintf(&out, "%d %s %s\n", l.Attrs().Index, l.Attrs().Name, l.Attrs().EncapType)
		}
		return err
	})
	if err != nil {
		return err.Error()
	}
	return out.String()
}

// watch is what Lacks calls. The listing is made before Lacks looks at interfaces
// itself: one that comes in between changes it.
func (w *following) watch(ref string, id netns.ID) {
	if w.seen[id].devices == "" {
		w.seen[id] = watched{ref, interfacesText(ref, id)}
	}
}

// follow attaches what is lacking.
func (w *following) follow(ctx context.Context) error {
	w.seen = map[netns.ID]watched{}
	all, err := w.root.Instances(w.Feature)
	if err != nil || len(all) == 0 {
		return err
	}
	w.unread.Keep(func(i kernel.Instance) bool { return slices.Contains(all, i) })
	var due []kernel.Instance
	for _, i := range all {
		lacks, err := w.Lacks(w.root, i, w.watch)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil { // which keeps nobody from recovering the others
			if w.unread.Changed(i, err.Error()) {
				w.log.Warn("a "+w.Feature+" cannot be looked after", w.Feature, i.Name, "err", err)
			}
			continue
		}
		w.unread.Changed(i, "")
		if lacks && time.Since(w.failed[i]) > lookAgain*lookEvery-lookEvery/2 {
			due = append(due, i)
		}
	}
	if len(due) == 0 {
		return nil
	}
	l, err := w.root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	for _, i := range due {
		w.adopt(l, i)
	}
	return nil
}

// adopt recovers one instance, and says so unless it has said the same before.
func (w *following) adopt(l *kernel.WriteLock, i kernel.Instance) {
	text, err := w.Adopt(l, i)
	if errors.Is(err, kernel.ErrNotExist) {
		return // removed meanwhile
	}
	if err != nil {
		text = err.Error()
		w.failed[i] = time.Now() // it is not tried again at once: commands wait for the lock
	}
	switch {
	case !w.said.Changed(i, text):
	case err != nil:
		w.log.Warn("a "+w.Feature+" cannot be attached", w.Feature, i.Name, "err", err)
	default:
		w.log.Info(w.Feature+" "+text, w.Feature, i.Name)
	}
}

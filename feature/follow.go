// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// lookEvery is the interval of a Follower's checks for new and removed interfaces. Every lookAgain-th check covers
// everything, even without a detected change: a ruleset may have been flushed, for example.
const (
	lookEvery = time.Second
	lookAgain = 10
)

// Follower attaches a feature's pinned instances to new interfaces within 1 s, in weir serve. It releases removed
// interfaces and gone namespaces. Traffic does not depend on it.
type Follower struct {
	Feature string // feature of the instances, and the noun for one of them
	// Lacks reports whether an instance lacks a possible attachment, or is to be removed. It changes nothing. It calls
	// watch for each namespace: a change of its interfaces triggers another call of Lacks.
	Lacks func(r *kernel.Root, i kernel.Instance, watch func(ref string, id netns.ID)) (bool, error)
	// Adopt completes an instance's attachments, or removes the instance. did describes the action: "attached to …".
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
			log.Warn(f.Feature+" instances not followed", "err", err)
		}
	}
	return nil
}

// following is the state of a running Follower.
type following struct {
	Follower
	root   *kernel.Root
	log    Logger
	said   Reported[kernel.Instance] // last action on each instance
	unread Reported[kernel.Instance] // last error of Lacks for each instance
	failed map[kernel.Instance]time.Time
	seen   map[netns.ID]watched
}

// watched is a namespace with its interfaces at the last check.
type watched struct {
	ref     string
	devices string
}

// changed reports whether interfaces may have changed since the last check. It lists the interfaces of each namespace
// once.
func (w *following) changed() bool {
	for id, n := range w.seen {
		if interfacesText(n.ref, id) != n.devices {
			return true
		}
	}
	return false
}

// interfacesText encodes a namespace's interfaces for comparison.
func interfacesText(ref string, id netns.ID) string {
	ns, err := netns.Find(ref, id)
	if err != nil {
		return err.Error()
	}
	defer ns.Close()
	var out strings.Builder
	err = ns.Do(func() error {
		all, err := dump.LinkList()
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

// watch is passed to Lacks. It lists the interfaces before Lacks reads them: an interface added in between is detected.
func (w *following) watch(ref string, id netns.ID) {
	if w.seen[id].devices == "" {
		w.seen[id] = watched{ref, interfacesText(ref, id)}
	}
}

// follow attaches missing attachments.
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
		} else if err != nil { // others are still recovered
			if w.unread.Changed(i, err.Error()) {
				w.log.Warn(w.Feature+" not followed", w.Feature, i.Name, "err", err)
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

// adopt recovers one instance, and logs the result unless it is unchanged.
func (w *following) adopt(l *kernel.WriteLock, i kernel.Instance) {
	text, err := w.Adopt(l, i)
	if errors.Is(err, kernel.ErrNotExist) {
		return // removed meanwhile
	}
	if err != nil {
		text = err.Error()
		w.failed[i] = time.Now() // retry later, because commands wait for the lock
	}
	switch {
	case !w.said.Changed(i, text):
	case err != nil:
		w.log.Warn(w.Feature+" not attached", w.Feature, i.Name, "err", err)
	default:
		w.log.Info(w.Feature+" "+text, w.Feature, i.Name)
	}
}

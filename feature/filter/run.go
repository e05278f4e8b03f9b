// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// lookEvery is how often weir serve looks for interfaces that came or went;
// lookAgain is after how many of these looks it looks at everything, also where
// nothing tells of a change: somebody may have flushed a ruleset.
const (
	lookEvery = time.Second
	lookAgain = 10
)

// Run implements feature.Runner: it attaches filters to interfaces that come, lets
// go of those that went, and of namespaces that are gone. Traffic needs none of it.
func (Feature) Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	w := &follower{root: r, log: log, said: map[kernel.Instance]string{}, failed: map[kernel.Instance]time.Time{}}
	changes, err := r.Changes()
	if err == nil {
		defer changes.Close()
		w.changes = changes
	} // else everything is looked at from time to time
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for n := 0; ; n++ {
		if n%lookAgain == 0 || w.changed() {
			if err := w.follow(ctx); err != nil && ctx.Err() == nil {
				log.Warn("filters cannot be looked after", "reason", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// follower is what weir serve knows of filters from one look to the next.
type follower struct {
	root    *kernel.Root
	log     feature.Logger
	changes *kernel.Changes
	said    map[kernel.Instance]string // what was last said of each filter
	failed  map[kernel.Instance]time.Time
	seen    map[uint64]watched // by inode number: the namespaces of filters
}

// watched is a namespace and its interfaces when they were last looked at.
type watched struct {
	ref     string
	devices string
}

// changed says whether pins or interfaces may be others than at the last look. It
// costs one listing of interfaces for each namespace.
func (w *follower) changed() bool {
	if w.changes != nil {
		_ = w.changes.Renew() // what is missed is found when everything is looked at
		select {
		case <-w.changes.C:
			return true
		default:
		}
	}
	for inode, n := range w.seen {
		if interfacesOf(n.ref, inode) != n.devices {
			return true
		}
	}
	return false
}

// interfacesOf is a namespace's interfaces in a text that changes with them.
func interfacesOf(ref string, inode uint64) string {
	ns, err := netns.Find(ref, inode)
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

// follow attaches what is lacking.
func (w *follower) follow(ctx context.Context) error {
	w.seen = map[uint64]watched{}
	all, err := w.root.Instances(Name)
	if err != nil || len(all) == 0 {
		return err
	}
	var due []kernel.Instance
	for _, i := range all {
		if is, err := w.needsUs(i); err != nil {
			return err
		} else if is && time.Since(w.failed[i]) > lookAgain*lookEvery-lookEvery/2 {
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
		did, err := adopt(l, i)
		text := did
		if err != nil {
			text = err.Error()
			w.failed[i] = time.Now() // it is not tried again at once: commands wait for the lock
		}
		switch {
		case w.said[i] == text:
		case err != nil:
			w.log.Warn("a filter cannot be attached", "filter", i.Name, "reason", err)
		default:
			w.log.Info("filter "+did, "filter", i.Name)
		}
		w.said[i] = text
	}
	return nil
}

// needsUs says whether a filter lacks a place that is there, or its namespace is gone.
func (w *follower) needsUs(i kernel.Instance) (bool, error) {
	o, err := w.root.Open(i)
	if errors.Is(err, kernel.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	defer o.Close()
	p, err := parse(i, o.Meta)
	if err != nil {
		return false, err
	}
	ns, err := netns.Find(p.Netns, p.meta.Inode) // whether it is another of that number, adopt asks
	if errors.Is(err, netns.ErrGone) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	defer ns.Close()
	if p.Filter.Hook.ofDevices() && w.seen[p.meta.Inode].devices == "" {
		w.seen[p.meta.Inode] = watched{p.Netns, interfacesOf(p.Netns, p.meta.Inode)}
	}
	places, err := p.Holder.holder().places(&site{inst: i, pub: p, pins: o, ns: ns})
	for _, pl := range places {
		if pl.lacks {
			return true, err
		}
	}
	return false, err
}

// adopt attaches a filter where it is lacking, or removes one whose namespace is gone.
func adopt(l *kernel.WriteLock, i kernel.Instance) (string, error) {
	s, err := openSite(l, i)
	switch {
	case errors.Is(err, netns.ErrGone):
		return "removed: its network namespace is gone", l.Remove(i)
	case errors.Is(err, kernel.ErrNotExist):
		return "removed meanwhile", nil
	case err != nil:
		return "", err
	}
	defer s.Close()
	places, err := s.pub.Holder.holder().places(s)
	if err != nil {
		return "", err
	}
	names := FilterState{Places: places}.lacking()
	if len(names) == 0 {
		return "is attached", nil
	}
	if err := s.attachAll(); err != nil {
		return "", err
	}
	return fmt.Sprintf("attached to %s", strings.Join(names, ", ")), nil
}

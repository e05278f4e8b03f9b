// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// lookEvery is how often weir serve looks for interfaces that came or went.
const lookEvery = time.Second

// Run implements feature.Runner: it attaches filters to interfaces that come, lets
// go of those that went, and of namespaces that are gone. Traffic needs none of it.
func (Feature) Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	said := map[kernel.Instance]string{}
	for tick := time.NewTicker(lookEvery); ; {
		if err := follow(ctx, r, log, said); err != nil && ctx.Err() == nil {
			log.Warn("filters cannot be looked after", "reason", err)
		}
		select {
		case <-ctx.Done():
			tick.Stop()
			return nil
		case <-tick.C:
		}
	}
}

// follow attaches what is lacking. said holds what was last said of each filter.
func follow(ctx context.Context, r *kernel.Root, log feature.Logger, said map[kernel.Instance]string) error {
	all, err := r.Instances(Name)
	if err != nil || len(all) == 0 {
		return err
	}
	var due []kernel.Instance
	for _, i := range all {
		if is, err := needsUs(r, i); err != nil {
			return err
		} else if is {
			due = append(due, i)
		}
	}
	if len(due) == 0 {
		return nil
	}
	l, err := r.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	for _, i := range due {
		did, err := adopt(l, i)
		text := did
		if err != nil {
			text = err.Error()
		}
		switch {
		case said[i] == text:
		case err != nil:
			log.Warn("a filter cannot be attached", "filter", i.Name, "reason", err)
		default:
			log.Info("filter "+did, "filter", i.Name)
		}
		said[i] = text
	}
	return nil
}

// needsUs says whether a filter lacks a place that is there, or its namespace is gone.
func needsUs(r *kernel.Root, i kernel.Instance) (bool, error) {
	o, err := r.Open(i)
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

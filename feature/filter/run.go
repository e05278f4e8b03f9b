// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Run implements feature.Runner. It attaches filters to new interfaces and removes links of
// vanished ones. It removes filters of vanished namespaces. Traffic does not depend on it.
func (Feature) Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	return feature.Follower{Feature: Name, Lacks: lacks, Adopt: adopt}.Run(ctx, r, log)
}

// lacks reports whether a possible attachment is missing, an interface was renamed, or the filter's namespace is gone.
func lacks(r *kernel.Root, i kernel.Instance, watch func(ref string, id netns.ID)) (bool, error) {
	u, err := filters.Open(r, i)
	if errors.Is(err, netns.ErrGone) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	defer u.Close()
	p := publishedFrom(u.Record)
	if p.Filter.Hook.ofDevices() || p.Filter.Netns != "" { // a named namespace can vanish, as when a container restarts
		watch(u.Ref, u.ID())
	}
	attachments, err := p.Attacher.attacher().attachments(&instance{inst: i, pub: p, pins: u.Pins, ns: u.Netns})
	for _, pl := range attachments {
		if pl.lacks || pl.stray {
			return true, err
		}
	}
	return false, err
}

// adopt attaches a filter to missing locations, or removes it if its namespace is gone.
func adopt(l *kernel.WriteLock, i kernel.Instance) (string, error) {
	s, err := openInstance(l, i)
	switch {
	case errors.Is(err, netns.ErrGone):
		return "removed: its network namespace is gone", filters.Remove(l, i)
	case err != nil:
		return "", err
	}
	defer s.Close()
	attachments, err := s.pub.Attacher.attacher().attachments(s)
	if err != nil {
		return "", err
	}
	f := FilterState{Attachments: attachments}
	names, strays := f.lacking(), f.strays()
	if len(names)+len(strays) == 0 {
		return "already attached", nil
	}
	if err := s.attachAll(); err != nil {
		return "", err
	}
	var did []string
	if len(names) > 0 {
		did = append(did, "attached to "+strings.Join(names, ", "))
	}
	if len(strays) > 0 {
		did = append(did, "detached from "+strings.Join(strays, ", "))
	}
	return strings.Join(did, ", "), nil
}

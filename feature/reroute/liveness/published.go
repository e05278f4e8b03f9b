// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// ABI is the layout version of the maps: liveness.h.
const ABI = 1

// instanceName names liveness' instance, one per network namespace.
const instanceName = "@liveness"

// store reads and writes the instances.
var store = instances.Store[published]{Feature: Name, ABI: ABI, Object: bpf.Object, Is: func(name string) bool { return name == instanceName },
	Ref: func(p *published) string { return p.Netns }}

func instance(scope string) kernel.Instance { return store.Name(scope, instanceName) }

func netnsScope(ns *netns.Handle) string { return kernel.ScopeOf(ns) }

// Pins of the instance.
const (
	pinSetups    = "setups"
	pinStates    = "states"
	pinIDs       = "ids"
	pinClockwork = "clockwork"
	pinBeats     = "beats"
	pinShared    = "shared"
	pinTimers    = "timers"
	pinCounts    = "counts"
	pinEvents    = "events"
	pinMoves     = "moves"
	pinLinks     = links.MapName
)

var sharedMaps = map[string]string{
	pinSetups: bpf.LivenessMapLivenessSetups, pinStates: bpf.LivenessMapLivenessStates, pinIDs: bpf.LivenessMapLivenessIds, pinClockwork: bpf.LivenessMapLivenessClockwork,
	pinBeats: bpf.LivenessMapLivenessBeats, pinShared: bpf.LivenessMapLivenessShared, pinTimers: bpf.LivenessMapLivenessTimers, pinCounts: bpf.LivenessMapLivenessCounts, pinEvents: bpf.LivenessMapLivenessEvents,
	pinMoves: bpf.LivenessMapLivenessMoves,
	pinLinks: links.MapName,
}

// PinnedMaps are the names of the pinned maps, by instance.
var PinnedMaps = map[string][]string{instanceName: slices.Sorted(maps.Keys(sharedMaps))}

// published is the liveness of a namespace as stored in its pins. It is the wanted state; reconcile applies it.
type published struct {
	Config  Config            `json:"config"`
	Netns   string            `json:"netns"`   // reference for reopening the namespace
	Indexes map[string]uint32 `json:"indexes"` // of sessions in the maps, by name

	netns.ID `json:"-"`
}

// publishedFrom returns the liveness of a record.
func publishedFrom(rec instances.Record[published]) published {
	rec.Spec.ID = rec.ID()
	return rec.Spec
}

// segment is a segment of ours in a routing table.
type segment struct {
	SID   string
	Table int // 0: main
}

func readPublished(r *kernel.Root, scope string) (published, error) {
	rec, err := store.Read(r, instance(scope))
	return publishedFrom(rec), err
}

// scopes returns the namespaces with liveness, readable or not.
func scopes(r *kernel.Root) (out []string, err error) {
	all, err := store.Keys(r)
	for _, i := range all {
		out = append(out, i.Scope)
	}
	return out, err
}

// assignIndexes gives every session an index. A session keeps its index with its name.
func (p *published) assignIndexes(before map[string]uint32) error {
	p.Indexes = map[string]uint32{}
	taken := map[uint32]bool{}
	for _, s := range p.Config.Sessions {
		if i, ok := before[s.Name]; ok {
			p.Indexes[s.Name], taken[i] = i, true
		}
	}
	next := uint32(0)
	for _, s := range p.Config.Sessions {
		if _, ok := p.Indexes[s.Name]; ok {
			continue
		}
		for taken[next] {
			next++
		}
		p.Indexes[s.Name], taken[next] = next, true
	}
	if next >= maxSessions {
		return fmt.Errorf("%d sessions: a network namespace can have %d", len(p.Config.Sessions), maxSessions)
	}
	return nil
}

// publish records the wanted state. The link states are shared with another instance of the namespace, or new.
func (p *published) publish(l *kernel.WriteLock, ns *netns.Handle) error {
	i := instance(netnsScope(ns))
	share := map[string]*ebpf.Map{}
	o, err := l.Open(i)
	if err == nil {
		defer o.Close()
		share = maps.Clone(o.Maps)
	} else if !errors.Is(err, kernel.ErrNotExist) {
		return err
	}
	if o == nil {
		shared, err := links.Shared(l, i)
		if err != nil {
			return err
		}
		if shared != nil {
			defer shared.Close()
			share[pinLinks] = shared
		}
	}
	made, err := makeMaps(share)
	defer closeMaps(made)
	if err != nil {
		return err
	}
	if o == nil {
		return store.Publish(l, i, instances.Form[published]{Spec: *p, Netns: ns, Pins: kernel.Pins{Maps: share}})
	}
	// The attached programs stay; upgrade replaces another weir's.
	return store.Respec(l, i, *p, share)
}

// makeMaps creates the maps missing in share and adds them.
func makeMaps(share map[string]*ebpf.Map) (made []*ebpf.Map, err error) {
	spec, err := bpf.LoadLiveness()
	if err != nil {
		return nil, err
	}
	for _, pin := range slices.Sorted(maps.Keys(sharedMaps)) {
		if share[pin] != nil {
			continue
		}
		m, err := ebpf.NewMap(cmp.Or(spec.Maps[sharedMaps[pin]], links.Spec()))
		if err != nil {
			return made, fmt.Errorf("creating the map %s: %w", sharedMaps[pin], err)
		}
		made = append(made, m)
		share[pin] = m
	}
	return made, nil
}

func closeMaps(all []*ebpf.Map) {
	for _, m := range all {
		m.Close()
	}
}

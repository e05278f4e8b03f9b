// SPDX-License-Identifier: Apache-2.0

package live

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/live/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// ABI is the version of the layout of the maps: live.h.
const ABI = 1

// instanceName is the one instance of a network namespace.
const instanceName = "@live"

func instance(scope string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: Name, Name: instanceName}
}

func scopeOf(ns *netns.Handle) string { return strconv.FormatUint(ns.Inode(), 10) }

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
	pinSetups: bpf.LiveMapLiveSetups, pinStates: bpf.LiveMapLiveStates, pinIDs: bpf.LiveMapLiveIds, pinClockwork: bpf.LiveMapLiveClockwork,
	pinBeats: bpf.LiveMapLiveBeats, pinShared: bpf.LiveMapLiveShared, pinTimers: bpf.LiveMapLiveTimers, pinCounts: bpf.LiveMapLiveCounts, pinEvents: bpf.LiveMapLiveEvents,
	pinMoves: bpf.LiveMapLiveMoves,
	pinLinks: links.MapName,
}

// published is liveness of a namespace as its pins describe it: what is wanted. sync makes the kernel so.
type published struct {
	Config Config            `json:"config"`
	Netns  string            `json:"netns"`  // what reopens the namespace
	Places map[string]uint32 `json:"places"` // of sessions in the maps, by name
	netns.ID
}

// segment is a segment of ours in a table of routes.
type segment struct {
	SID   string
	Table int // 0: main
}

func readPublished(r *kernel.Root, scope string) (p published, meta kernel.Meta, err error) {
	meta, err = r.Meta(instance(scope))
	if err != nil {
		return p, meta, err
	}
	p, err = parsePublished(scope, meta)
	return p, meta, err
}

func parsePublished(scope string, meta kernel.Meta) (p published, err error) {
	if err := meta.RequireABI(instance(scope), ABI); err != nil {
		return p, err
	}
	if err := json.Unmarshal(meta.Config, &p); err != nil {
		return p, fmt.Errorf("%s: %w", instance(scope), err)
	}
	p.ID = meta.ID()
	return p, nil
}

// scopes are the namespaces that have liveness.
func scopes(r *kernel.Root) (out []string, err error) {
	all, err := r.Instances(Name)
	for _, i := range all {
		if i.Name == instanceName {
			out = append(out, i.Scope)
		}
	}
	return out, err
}

// place gives every session a place, which it keeps as long as it has its name.
func (p *published) place(before map[string]uint32) error {
	p.Places = map[string]uint32{}
	taken := map[uint32]bool{}
	for _, s := range p.Config.Sessions {
		if i, ok := before[s.Name]; ok {
			p.Places[s.Name], taken[i] = i, true
		}
	}
	next := uint32(0)
	for _, s := range p.Config.Sessions {
		if _, ok := p.Places[s.Name]; ok {
			continue
		}
		for taken[next] {
			next++
		}
		p.Places[s.Name], taken[next] = next, true
	}
	if next >= MaxSessions {
		return fmt.Errorf("%d sessions: a network namespace can have %d", len(p.Config.Sessions), MaxSessions)
	}
	return nil
}

// publish records what is wanted. The words of links are those that another instance of the namespace has, or new ones.
func (p *published) publish(l *kernel.WriteLock, ns *netns.Handle) error {
	i := instance(scopeOf(ns))
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
	config, err := json.Marshal(p)
	if err != nil {
		return err
	}
	meta := kernel.Meta{ABI: ABI, Object: kernel.ObjectHash(bpf.Object()), Inode: p.Inode, Created: time.Now(), Version: kernel.Version, Config: config}
	meta.Cookie, _ = ns.Cookie() // 0 where the kernel has none
	pins := kernel.Pins{Maps: share}
	if o == nil {
		return l.Publish(i, meta, pins)
	}
	names, err := o.Links()
	if err != nil {
		return err
	}
	// The programs that are attached stay what they are: sync exchanges them where they are another weir's.
	meta.Object = o.Meta.Object
	return l.Upgrade(i, kernel.Upgrade{Meta: meta, Pins: pins, Keep: names, Swap: func() error { return nil }})
}

// makeMaps adds to share the maps that are missing.
func makeMaps(share map[string]*ebpf.Map) (made []*ebpf.Map, err error) {
	spec, err := bpf.LoadLive()
	if err != nil {
		return nil, err
	}
	for _, pin := range slices.Sorted(maps.Keys(sharedMaps)) {
		if share[pin] != nil {
			continue
		}
		m, err := ebpf.NewMap(cmp.Or(spec.Maps[sharedMaps[pin]], links.Spec()))
		if err != nil {
			return made, fmt.Errorf("making the map %s: %w", sharedMaps[pin], err)
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

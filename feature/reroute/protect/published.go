// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Feature is the pin directory, shared with liveness.
const Feature = "reroute"

// instanceName names protection's instance, one per network namespace.
const instanceName = "@protect"

// ABI is the layout version of the maps: protect.h.
const ABI = 1

// published is a path as stored in the pins.
type published struct {
	Path
	Row int `json:"row"` // row of its counters
}

// scopeSpec is the configuration of an instance. It is authoritative: reconcile derives maps, links, neighbours and
// the helper namespace from it.
type scopeSpec struct {
	Netns string      `json:"netns"` // reference for reopening the namespace
	Paths []published `json:"paths"`

	netns.ID `json:"-"`
	followed bool // a process runs [Run] for the instance
}

// store reads and writes the instances.
var store = instances.Store[scopeSpec]{Feature: Feature, ABI: ABI, Object: bpf.Object, Is: func(name string) bool { return name == instanceName },
	Ref: func(w *scopeSpec) string { return w.Netns }}

func instanceKey(scope string) kernel.Instance { return store.Name(scope, instanceName) }

func netnsScope(ns *netns.Handle) string { return kernel.ScopeOf(ns) }

// Pin names of the instance's maps, and their names in the object. Only user space uses neighbours and devices.
const (
	pinRepairs    = "repairs"
	pinPaths      = "paths"
	pinPrefixes   = "prefixes"
	pinCounts     = "counts"
	pinNeighbours = "neighbours"
	pinDevices    = "devices"
	pinLinks      = links.MapName
	linkPrefix    = "dev" // followed by the interface index
)

var mapNames = map[string]string{pinRepairs: bpf.ProtectMapRerouteRepairs, pinPaths: bpf.ProtectMapReroutePaths, pinPrefixes: bpf.ProtectMapRerouteLpm,
	pinCounts: bpf.ProtectMapRerouteCounts, pinLinks: bpf.ProtectMapRerouteLinks}

// PinnedMaps are the names of the pinned maps, by instance.
var PinnedMaps = map[string][]string{instanceName: {pinRepairs, pinPaths, pinPrefixes, pinCounts, pinNeighbours, pinDevices, pinLinks}}

// allInstances lists the namespaces with protection, readable or not.
func allInstances(r *kernel.Root) ([]kernel.Instance, error) { return store.Keys(r) }

// specFrom returns the configuration of a record.
func specFrom(rec instances.Record[scopeSpec]) scopeSpec {
	rec.Spec.ID = rec.ID()
	return rec.Spec
}

func readSpec(r *kernel.Root, i kernel.Instance) (scopeSpec, error) {
	rec, err := store.Read(r, i)
	return specFrom(rec), err
}

// publish sets the paths of a namespace and reconciles it.
func publish(l *kernel.WriteLock, ns *netns.Handle, want scopeSpec) error {
	inst := instanceKey(netnsScope(ns))
	was, err := readSpec(l.Root, inst)
	switch {
	case errors.Is(err, kernel.ErrNotExist) && len(want.Paths) == 0:
		return nil
	case errors.Is(err, kernel.ErrNotExist):
		err = create(l, ns, want)
	case err == nil:
		if want.number(was.Paths); len(want.Paths) > maxPaths {
			return fmt.Errorf("%d paths: at most %d", len(want.Paths), maxPaths)
		}
		err = store.Respec(l, inst, want, nil) // the running programs stay
	}
	if err != nil {
		return err
	}
	kernel.Step("protect:published")
	return reconcile(l, inst)
}

// number assigns the rows of counters. A path keeps the row of the previous path with its name.
func (w *scopeSpec) number(before []published) {
	taken := map[int]bool{}
	for i := range w.Paths {
		w.Paths[i].Row = 0
		for _, b := range before {
			if b.Name == w.Paths[i].Name {
				w.Paths[i].Row = b.Row
				taken[b.Row] = true
			}
		}
	}
	next := 1
	for i := range w.Paths {
		if w.Paths[i].Row > 0 {
			continue
		}
		for taken[next] {
			next++
		}
		w.Paths[i].Row, taken[next] = next, true
	}
}

// create publishes an instance without a link, so it reroutes nothing yet.
func create(l *kernel.WriteLock, ns *netns.Handle, want scopeSpec) error {
	want.number(nil)
	spec, err := bpf.LoadProtect()
	if err != nil {
		return err
	}
	shared, err := links.Shared(l, instanceKey(netnsScope(ns)))
	if err != nil {
		return err
	}
	specs := map[string]*ebpf.MapSpec{
		pinNeighbours: {Name: "reroute_neigh", Type: ebpf.Hash, KeySize: 24, ValueSize: 8, MaxEntries: 4096},
		pinDevices:    {Name: "reroute_device", Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: links.Slots},
	}
	for pin, name := range mapNames {
		specs[pin] = spec.Maps[name]
	}
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{}}
	for pin, s := range specs {
		m := shared
		if pin != pinLinks || m == nil {
			if m, err = ebpf.NewMap(s); err != nil {
				return fmt.Errorf("creating the map %s: %w", s.Name, err)
			}
		}
		defer m.Close()
		pins.Maps[pin] = m
	}
	return store.Publish(l, instanceKey(netnsScope(ns)), instances.Form[scopeSpec]{Spec: want, Netns: ns, Pins: pins})
}

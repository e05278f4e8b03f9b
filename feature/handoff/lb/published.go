// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"errors"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/feature/handoff/lb/attachment"
	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/names"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
	"github.com/weir-project/weir/kernel/probe"
)

// ABI is the version of the maps' layout: lb.h.
const ABI = 1

// Needs are the kernel features of a load balancer. Without tcx its programs are filters of the devices' clsact qdiscs, without
// links.
var Needs = []kernel.Need{probe.TCRedirect, kernel.TCXLink, kernel.ClsactFilter}

var store = instances.Store[Options]{Feature: spec.PinFeature, ABI: ABI, Object: bpf.Object, Is: func(name string) bool { return strings.HasPrefix(name, spec.PinPrefix) }}

func instanceKey(ns *netns.Handle, name string) kernel.Instance {
	return store.Name(kernel.ScopeOf(ns), spec.PinPrefix+name)
}

// Open creates a persistent load balancer in the network namespace of the calling thread, or continues an existing one of that
// name. An existing one keeps its flows, with owners, epochs and buffering deadlines. The data path works without a process. Open
// replaces its programs by this version's under traffic. Close leaves it running. [Remove] ends it.
func Open(ctx context.Context, root *kernel.Root, name string, o Options) (_ *DataPath, err error) {
	if err := kernel.Require(Needs); err != nil {
		return nil, err
	}
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	inst := instanceKey(ns, name)
	l, err := root.Lock(ctx)
	if err != nil {
		ns.Close()
		return nil, err
	}
	defer l.Unlock()
	f := &DataPath{ns: ns, bufferFor: time.Minute, stays: true}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	share, err := earlier(l, inst)
	if err != nil {
		return nil, err
	}
	defer closeMaps(share)
	if err := f.build(o, share); err != nil {
		return nil, err
	}
	return f, f.publish(l, inst, o)
}

func earlier(l *kernel.WriteLock, inst kernel.Instance) (map[string]*ebpf.Map, error) {
	before, err := l.Open(inst)
	if errors.Is(err, kernel.ErrDamaged) { // openNames replaces a lost map of names, as for an earlier weir
		before, err = l.Open(inst, slices.DeleteFunc(slices.Clone(mapPins), func(pin string) bool { return pin == names.MapName })...)
	}
	if errors.Is(err, kernel.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if err := before.Meta.RequireABI(inst, ABI); err != nil {
		before.Close()
		return nil, err
	}
	share := map[string]*ebpf.Map{}
	for pin, m := range before.Maps {
		share["lb_"+pin] = m
	}
	return share, nil
}

func closeMaps(m map[string]*ebpf.Map) {
	for _, m := range m {
		m.Close()
	}
}

// mapPins are the names of the pinned maps.
var mapPins = []string{"services", "ring", "backends", "macs", "tunnels", "setup", "flows", "counts", "sources", names.MapName}

// publish pins maps and links. Until the predecessor's links are removed, a device has both programs, over the same maps. The
// first program decides, so no packet passes unseen.
func (f *DataPath) publish(l *kernel.WriteLock, inst kernel.Instance, o Options) error {
	m := f.maps.LBMaps
	pins := kernel.Pins{Links: f.links, Maps: map[string]*ebpf.Map{"services": m.LbServices, "ring": m.LbRing, "backends": m.LbBackends,
		"macs": m.LbMacs, "tunnels": m.LbTunnels, "setup": m.LbSetup, "flows": m.LbFlows, "counts": m.LbCounts, "sources": m.LbSources, names.MapName: f.names.Map()}, Optional: []string{names.MapName}}
	if err := store.Publish(l, inst, instances.Form[Options]{Spec: o, Netns: f.ns, Pins: pins}); err != nil {
		return err
	}
	l.NoteFilters(inst, f.filters)
	kernel.Step("lb:published")
	return nil
}

// Remove ends a load balancer of the network namespace and deletes its devices. Flows then follow the kernel's routes. It is no
// error if the namespace has no load balancer.
func Remove(ctx context.Context, root *kernel.Root, ns *netns.Handle, name string) error {
	l, err := root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	all, err := Instances(l.Root)
	if err != nil {
		return err
	}
	inst := instanceKey(ns, name)
	here := slices.DeleteFunc(all, func(o kernel.Instance) bool { return o.Scope != inst.Scope })
	if len(here) > 0 && !slices.ContainsFunc(here, func(o kernel.Instance) bool { return o.Name == inst.Name }) {
		return errOther(name, here)
	}
	return removeIn(l, ns, name)
}

// removeAll ends the load balancers of all network namespaces, as Remove does.
func removeAll(l *kernel.WriteLock) error {
	all, err := Instances(l.Root)
	for _, inst := range all {
		ns, e := l.OpenNetns(inst)
		if errors.Is(e, netns.ErrGone) { // and its devices with it
			e = forget(l, inst)
		} else if e == nil {
			if _, rerr := store.Read(l.Root, inst); rerr != nil {
				e = removeUnread(l, inst, ns)
			} else {
				e = remove(l, inst, ns)
			}
			ns.Close()
		}
		err = errors.Join(err, e)
	}
	return err
}

func remove(l *kernel.WriteLock, inst kernel.Instance, ns *netns.Handle) error {
	rec, err := store.Read(l.Root, inst)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	if err := removeLinks(l, inst); err != nil {
		return err
	}
	o := rec.Spec.filled()
	if err := ns.Do(func() error { return errors.Join(attachment.Detach(o.Devices), removeDevices(o)) }); err != nil {
		return err
	}
	return forget(l, inst)
}

// forget removes the pins of a load balancer, and the socket of a killed agent.
func forget(l *kernel.WriteLock, inst kernel.Instance) error {
	defer control.Clear(controlName(inst.Scope, inst.Name[len(spec.PinPrefix):]))
	return store.Remove(l, inst)
}

// removeLinks detaches the programs. The pins of maps and options stay until the devices are deleted. A removal after a kill
// finds the rest through them.
func removeLinks(l *kernel.WriteLock, inst kernel.Instance) error {
	o, err := l.OpenRest(inst)
	if err != nil {
		return err
	}
	defer o.Close()
	names, err := o.Links()
	for _, name := range names {
		err = errors.Join(err, l.RemoveLink(inst, name))
	}
	return err
}

// removeUnread ends a load balancer with unreadable options. It finds the filters by name, at every device.
func removeUnread(l *kernel.WriteLock, inst kernel.Instance, ns *netns.Handle) error {
	err := ns.Do(func() error {
		all, err := net.Interfaces()
		for _, i := range all {
			err = errors.Join(err, attachment.Filter(i.Index, false).Detach(false))
		}
		return errors.Join(err, removeDevices(Options{}.filled()))
	})
	return errors.Join(err, forget(l, inst))
}

// Instances returns the pinned load balancers of all network namespaces.
func Instances(root *kernel.Root) ([]kernel.Instance, error) {
	return store.Keys(root)
}

// View opens the pins of a load balancer for Flow, Flows, Counts and Close. It takes no lock and changes nothing.
func View(root *kernel.Root, inst kernel.Instance) (*DataPath, error) {
	return view(root, inst, "flows", "counts")
}

func view(root *kernel.Root, inst kernel.Instance, pins ...string) (*DataPath, error) {
	o, err := root.Open(inst, pins...)
	if err != nil {
		return nil, err
	}
	if _, err := store.Decode(inst, o.Meta); err != nil {
		o.Close()
		return nil, err
	}
	f := &DataPath{stays: true}
	for _, m := range slices.Sorted(maps.Keys(o.Maps)) {
		switch m {
		case "flows":
			f.maps.LbFlows = o.Maps[m]
		case "counts":
			f.maps.LbCounts = o.Maps[m]
		case "ring":
			f.maps.LbRing = o.Maps[m]
		case "tunnels":
			f.maps.LbTunnels = o.Maps[m]
		}
	}
	return f, nil
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"maps"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
	"golang.org/x/sys/unix"
)

// copy: SERVICE gives every datagram of a service to another one too: to try a new
// collector with all of the old one's traffic, or to move from one to the other. A
// filter of every device's incoming packets does it (bpf/copy.bpf.c), since no lookup
// can have two answers. TCP cannot be copied so: it is a dialogue.

// CopyFilter is the name that tc shows.
const CopyFilter = "weir_copy"

// CopyInstance exists while a service of the namespace is copied. What it pins
// outlives nothing: the filters are taken away before it.
func CopyInstance(scope string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: spec.Name, Name: "@copy"}
}

// Copies tells of a service whose datagrams another one gets too.
type Copies struct {
	To         string `json:"to"`
	Copied     uint64 `json:"copied"`     // datagrams
	Fragmented uint64 `json:"fragmented"` // came in fragments, and were not copied
	Failed     uint64 `json:"failed"`     // the kernel refused
}

// ReconcileCopies makes the filters of a namespace do what the pins of its services say.
// Run again, it recovers what a killed command left, and takes in devices that have
// come since. Where nothing is there and wanted is false, nobody wants it. gone are
// services that the command took away: of others that it does not know it leaves the copies,
// as those of a service that cannot be read. Filters of another ABI stay as they are.
func ReconcileCopies(l *kernel.WriteLock, scope string, wanted bool, gone ...*record.Service) error {
	o, err := l.Open(CopyInstance(scope))
	if err == nil {
		if err := o.Meta.RequireABI(o.Instance, record.ABI); err != nil {
			o.Close()
			return nil //nolint:nilerr // status, plans and doctor tell of it
		}
	}
	switch {
	case errors.Is(err, kernel.ErrABI):
		return nil
	case errors.Is(err, kernel.ErrNotExist) && !wanted:
		return nil
	case errors.Is(err, kernel.ErrNotExist):
		o = nil
	case err != nil:
		return err
	default:
		defer o.Close()
	}
	services := map[string]*record.Service{}
	var unread instances.Unreadable
	ref := ""
	for _, kind := range record.Engines {
		some, bad, err := record.ReadAll(l.Root, scope, kind)
		if err != nil {
			return err
		}
		maps.Copy(services, some)
		for _, p := range some {
			ref = p.Netns
		}
		unread = bad
	}
	want := record.Copies(services)
	if o != nil && len(unread) > 0 {
		have, err := Entries[bpf.CopyCopyKey, bpf.CopyCopyTo](o.Maps["targets"])
		if err != nil {
			return err
		}
		record.KeepCopies(want, have, services, gone, unread)
	}
	if len(want) == 0 {
		return RemoveCopies(l, scope, o)
	}
	ns, err := l.OpenScope(ref, scope)
	if errors.Is(err, slots.ErrNetnsGone) {
		return nil
	} else if err != nil {
		return err
	}
	defer ns.Close()
	if err := putCopies(l, ns, o, want); err != nil {
		return fmt.Errorf("copying datagrams in %s: %w", ns, err)
	}
	return nil
}

// putCopies fills the maps and puts the filters up. o is nil where there is nothing yet.
func putCopies(l *kernel.WriteLock, ns *netns.Handle, o *kernel.Opened, want map[bpf.CopyCopyKey]bpf.CopyCopyTo) error {
	spec, err := bpf.LoadCopy()
	if err != nil {
		return err
	}
	meta, err := record.Shared.Meta(instances.Form[struct{}]{Netns: ns, Object: kernel.ObjectHash(bpf.CopyObject)})
	if err != nil {
		return err
	}
	share := map[string]*ebpf.Map{}
	if o != nil {
		share[bpf.CopyMapCopyTargets], share[bpf.CopyMapCopyDevices] = o.Maps["targets"], o.Maps["devices"]
	}
	c, err := kernel.Load(spec, []string{bpf.CopyProgCopyIngress}, share)
	if err != nil {
		return err
	}
	defer c.Close()
	targets, devices := c.Maps[bpf.CopyMapCopyTargets], c.Maps[bpf.CopyMapCopyDevices]
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{"targets": targets, "devices": devices}}
	fresh := len(share) == 0
	if fresh {
		// Before the filters: what is pinned is how they are found again.
		if err := l.Publish(CopyInstance(record.Scope(ns)), meta, pins); err != nil {
			return err
		}
	}
	if err := setCopies(targets, want); err != nil {
		return err
	}
	renew := fresh || o.Meta.Object != meta.Object
	err = ns.Do(func() error { return filterDevices(devices, c.Programs[bpf.CopyProgCopyIngress], renew) })
	if err == nil && renew && !fresh {
		err = l.Publish(CopyInstance(record.Scope(ns)), meta, pins)
	}
	if err == nil {
		err = noteCopies(l, ns, devices)
	}
	return err
}

// noteCopies records the filters, so that their loss is told.
func noteCopies(l *kernel.WriteLock, ns *netns.Handle, devices *ebpf.Map) error {
	have, err := Entries[uint32, bpf.CopyCopyDevice](devices)
	var all []kernel.Clsact
	for index := range have {
		all = append(all, kernel.Clsact{Ifindex: int(index), Name: CopyFilter})
	}
	return errors.Join(err, ns.Do(func() error { l.NoteFilters(CopyInstance(record.Scope(ns)), all); return nil }))
}

// setCopies changes what differs, so that the counters of the rest go on.
func setCopies(targets *ebpf.Map, want map[bpf.CopyCopyKey]bpf.CopyCopyTo) error {
	have, err := Entries[bpf.CopyCopyKey, bpf.CopyCopyTo](targets)
	if err != nil {
		return err
	}
	for k, v := range want {
		old, ok := have[k]
		old.Copied, old.Fragmented, old.Failed = 0, 0, 0
		if ok && old == v {
			continue
		}
		if err := targets.Put(k, v); err != nil {
			return err
		}
		kernel.Step("steer:copy")
	}
	for k := range have {
		if _, ok := want[k]; !ok {
			if err := targets.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
			kernel.Step("steer:copy")
		}
	}
	return nil
}

// filterDevices has every device on which packets for this host arrive run prog,
// and no other: with renew also those that have the filter. It runs in the namespace.
func filterDevices(devices *ebpf.Map, prog *ebpf.Program, renew bool) error {
	have, err := Entries[uint32, bpf.CopyCopyDevice](devices)
	if err != nil {
		return err
	}
	headers, err := spec.CopyDevices()
	if err != nil {
		return err
	}
	for index, header := range headers {
		tc := kernel.Clsact{Ifindex: int(index), Name: CopyFilter}
		attached, err := tc.Attached()
		if err != nil {
			return err
		}
		old, known := have[index]
		if attached && known && !renew {
			continue
		}
		if !known {
			there, err := tc.HasQdisc()
			if err != nil {
				return err
			}
			old = bpf.CopyCopyDevice{Header: header}
			if !there {
				old.Qdisc = 1
			}
			if err := devices.Put(index, old); err != nil {
				return err
			}
		}
		if err := tc.Attach(prog); err != nil && !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	for index, d := range have {
		if _, ok := headers[index]; !ok {
			if err := dropFilter(devices, index, d); err != nil {
				return err
			}
		}
	}
	return nil
}

func dropFilter(devices *ebpf.Map, index uint32, d bpf.CopyCopyDevice) error {
	if err := (kernel.Clsact{Ifindex: int(index), Name: CopyFilter}).Detach(d.Qdisc == 1); err != nil {
		return err
	}
	if err := devices.Delete(index); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// RemoveCopies takes a namespace's filters away, and then the pins by which they
// are found.
func RemoveCopies(l *kernel.WriteLock, scope string, o *kernel.Opened) error {
	if o == nil {
		return nil
	}
	ns, err := l.OpenScope("", scope)
	if err == nil {
		defer ns.Close()
		err = ns.Do(func() error {
			have, err := Entries[uint32, bpf.CopyCopyDevice](o.Maps["devices"])
			for index, d := range have {
				err = errors.Join(err, dropFilter(o.Maps["devices"], index, d))
			}
			return err
		})
	}
	if err != nil && !errors.Is(err, slots.ErrNetnsGone) { // with the namespace its devices went
		return err
	}
	return l.Remove(CopyInstance(scope))
}

// reconcileAllCopies is syncCopies for every namespace.
func reconcileAllCopies(l *kernel.WriteLock) error {
	all, err := l.Instances(spec.Name)
	if err != nil {
		return err
	}
	scopes := map[string]bool{}
	for _, i := range all {
		scopes[i.Scope] = scopes[i.Scope] || i.Scope != kernel.HostScope
	}
	for scope, is := range scopes {
		if is {
			if err := ReconcileCopies(l, scope, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// ProblemCopy is the Problem of a service whose copies nobody makes.
const ProblemCopy = "its datagrams are not copied: the service that is to get them is not there, or the filters are missing; weir apply recovers it"

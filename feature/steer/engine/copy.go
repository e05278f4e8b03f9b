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

// copy: SERVICE duplicates every datagram of a service to another service: to test a new collector with all traffic, or
// to migrate to it. A lookup has only one result, so a filter on every device's ingress makes the copies
// (bpf/copy.bpf.c). TCP cannot be copied, because each side answers the other.

// CopyFilter is the filter's name in tc.
const CopyFilter = "weir_copy"

// CopyInstance exists while a service of the namespace is copied. Its filters are removed before it.
func CopyInstance(scope string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: spec.Name, Name: "@copy"}
}

// Copies describes the copies of a service.
type Copies struct {
	To         string `json:"to"`
	Copied     uint64 `json:"copied"`     // datagrams
	Fragmented uint64 `json:"fragmented"` // arrived in fragments, not copied
	Failed     uint64 `json:"failed"`     // rejected by the kernel
}

// ReconcileCopies makes the filters of a namespace match the pins of its services. It is idempotent, recovers a killed
// command, and includes new devices. With wanted false, it does nothing if there is no instance. gone are the services
// removed by this command. Other unknown copies may belong to unreadable services and remain. Filters of another ABI
// remain unchanged.
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
		return fmt.Errorf("copy datagrams in %s: %w", ns, err)
	}
	return nil
}

// putCopies fills the maps and attaches the filters. o is nil if there is no instance yet.
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
		// Publish before the filters are attached: a later command finds the filters through the pins.
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

// noteCopies records the filters, so weir detects their loss.
func noteCopies(l *kernel.WriteLock, ns *netns.Handle, devices *ebpf.Map) error {
	have, err := Entries[uint32, bpf.CopyCopyDevice](devices)
	var all []kernel.Clsact
	for index := range have {
		all = append(all, kernel.Clsact{Ifindex: int(index), Name: CopyFilter})
	}
	return errors.Join(err, ns.Do(func() error { l.NoteFilters(CopyInstance(record.Scope(ns)), all); return nil }))
}

// setCopies changes only entries that differ. The counters of the others continue.
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

// filterDevices makes every device with packets for this host run prog, and removes the filter from all others. With
// renew it also replaces existing filters. It runs in the namespace.
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

// RemoveCopies removes a namespace's filters, then the pins that list them.
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
	if err != nil && !errors.Is(err, slots.ErrNetnsGone) { // the devices vanished with the namespace
		return err
	}
	return l.Remove(CopyInstance(scope))
}

// reconcileAllCopies calls ReconcileCopies for every namespace.
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

// ProblemCopy is the Problem of a service whose datagrams are not copied.
const ProblemCopy = "its datagrams are not copied: the target service or the filters are missing: weir apply recovers it"

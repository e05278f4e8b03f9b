// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// copy: SERVICE gives every datagram of a service to another one too: to try a new
// collector with all of the old one's traffic, or to move from one to the other. A
// filter of every device's incoming packets does it (bpf/copy.bpf.c), since no lookup
// can have two answers. TCP cannot be copied so: it is a dialogue.

// copyFilter is the name that tc shows.
const copyFilter = "weir_copy"

// copyInstance exists while a service of the namespace is copied. What it pins
// outlives nothing: the filters are taken away before it.
func copyInstance(scope string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: Name, Name: "@copy"}
}

// Copies tells of a service whose datagrams another one gets too.
type Copies struct {
	To         string `json:"to"`
	Copied     uint64 `json:"copied"`     // datagrams
	Fragmented uint64 `json:"fragmented"` // came in fragments, and were not copied
	Failed     uint64 `json:"failed"`     // the kernel refused
}

// checkCopy says what is wrong with the copy of s to another of the services.
func checkCopy(s Service, all []Service) string {
	if s.Copy == "" {
		return ""
	}
	seen := map[string]bool{s.Name: true}
	for at := s; at.Copy != ""; {
		if seen[at.Copy] {
			return fmt.Sprintf("copy: %s comes back to %s: copies must not go round in a circle", s.Copy, s.Name)
		}
		seen[at.Copy] = true
		i := slices.IndexFunc(all, func(o Service) bool { return o.Name == at.Copy })
		if i < 0 && at.Name == s.Name {
			return fmt.Sprintf("copy: there is no service %q in this file: name one whose members are to get the datagrams too", s.Copy)
		} else if i < 0 {
			break
		}
		at = all[i]
	}
	to := all[slices.IndexFunc(all, func(o Service) bool { return o.Name == s.Copy })]
	if to.Netns != s.Netns {
		return fmt.Sprintf("copy: %s is in another network namespace: a copy cannot leave its own", s.Copy)
	}
	if _, err := copyTargets(s.Endpoints(), to.Endpoints()); err != nil {
		return fmt.Sprintf("copy: %s: %v", s.Copy, err)
	}
	return ""
}

// copyTargets says where the copies of each endpoint of a service go: to the other
// service's listen for UDP of the same family and the same place in their order, or
// to its only one.
func copyTargets(from, to []service.Endpoint) (map[bpf.CopyCopyKey]bpf.CopyCopyTo, error) {
	out := map[bpf.CopyCopyKey]bpf.CopyCopyTo{}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		other := func(e service.Endpoint) bool { return e.Proto != unix.IPPROTO_UDP || e.Family != family }
		sources, targets := slices.DeleteFunc(slices.Clone(from), other), slices.DeleteFunc(slices.Clone(to), other)
		for i, e := range sources {
			n := min(i, len(targets)-1)
			switch {
			case n < 0:
				return nil, fmt.Errorf("it listens to nothing that the datagrams to %s could go to: give it a udp listen of that family", e)
			case n < i && len(targets) > 1:
				return nil, fmt.Errorf("it has %d udp listens of a family, and %d are to be copied: give it as many, or one", len(targets), len(sources))
			}
			t := targets[n]
			key, value := copyKey(e), bpf.CopyCopyTo{Port: networkOrder(t.Port)}
			switch t.Prefix.Bits() {
			case 0:
			case t.Prefix.Addr().BitLen():
				value.Readdressed = 1
				copy(value.Addr[:], t.Prefix.Addr().AsSlice())
			default:
				return nil, fmt.Errorf("it listens to a prefix, %s, so a copy would have no address: give it a wildcard or one address", t.Prefix)
			}
			out[key] = value
		}
	}
	if len(out) == 0 {
		return nil, errors.New("only datagrams are copied, and the service listens to no UDP")
	}
	return out, nil
}

func copyKey(e service.Endpoint) bpf.CopyCopyKey {
	k := bpf.CopyCopyKey{Prefixlen: 32 + uint32(e.Prefix.Bits()), Family: e.Family, Port: e.Port}
	copy(k.Addr[:], e.Prefix.Masked().Addr().AsSlice())
	return k
}

// copies are the targets of all services of a namespace. A service whose target is
// not there yet, or any more, is not copied.
func copies(services map[string]*published) map[bpf.CopyCopyKey]bpf.CopyCopyTo {
	out := map[bpf.CopyCopyKey]bpf.CopyCopyTo{}
	for _, p := range services {
		to := services[p.Service.Copy]
		if p.Service.Copy == "" || p.Bypassed || to == nil {
			continue
		}
		if targets, err := copyTargets(p.Service.Endpoints(), to.Service.Endpoints()); err == nil {
			maps.Copy(out, targets)
		}
	}
	return out
}

// syncCopies makes the filters of a namespace do what the pins of its services say.
// Run again, it mends what a killed command left, and takes in devices that have
// come since. Where nothing is there and wanted is false, nobody wants it.
func syncCopies(l *kernel.WriteLock, scope string, wanted bool) error {
	o, err := l.Open(copyInstance(scope))
	switch {
	case errors.Is(err, kernel.ErrNotExist) && !wanted:
		return nil
	case errors.Is(err, kernel.ErrNotExist):
		o = nil
	case err != nil:
		return err
	default:
		defer o.Close()
	}
	services := map[string]*published{}
	ref := ""
	for _, kind := range kinds {
		some, err := readServices(l.Root, scope, kind)
		if err != nil {
			return err
		}
		maps.Copy(services, some)
		for _, p := range some {
			ref = p.Netns
		}
	}
	want := copies(services)
	if len(want) == 0 {
		return removeCopies(l, scope, o)
	}
	ns, err := l.OpenScope(ref, scope)
	if errors.Is(err, ErrNetnsGone) {
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
	meta := kernel.Meta{ABI: ABI, Object: kernel.ObjectHash(bpf.CopyObject), Inode: ns.Inode(), Created: time.Now(), Version: Version}
	share := map[string]*ebpf.Map{}
	if o != nil {
		if err := o.Meta.RequireABI(o.Instance, ABI); err != nil {
			return err
		}
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
		if err := l.Publish(copyInstance(scopeOf(ns)), meta, pins); err != nil {
			return err
		}
	}
	if err := setCopies(targets, want); err != nil {
		return err
	}
	renew := fresh || o.Meta.Object != meta.Object
	err = ns.Do(func() error { return filterDevices(devices, c.Programs[bpf.CopyProgCopyIngress], renew) })
	if err == nil && renew && !fresh {
		err = l.Publish(copyInstance(scopeOf(ns)), meta, pins)
	}
	if err == nil {
		err = noteCopies(l, ns, devices)
	}
	return err
}

// noteCopies records the filters, so that their loss is told.
func noteCopies(l *kernel.WriteLock, ns *netns.Handle, devices *ebpf.Map) error {
	have, err := entries[uint32, bpf.CopyCopyDevice](devices)
	var all []kernel.Clsact
	for index := range have {
		all = append(all, kernel.Clsact{Ifindex: int(index), Name: copyFilter})
	}
	return errors.Join(err, ns.Do(func() error { l.NoteFilters(copyInstance(scopeOf(ns)), all); return nil }))
}

// setCopies changes what differs, so that the counters of the rest go on.
func setCopies(targets *ebpf.Map, want map[bpf.CopyCopyKey]bpf.CopyCopyTo) error {
	have, err := entries[bpf.CopyCopyKey, bpf.CopyCopyTo](targets)
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
	have, err := entries[uint32, bpf.CopyCopyDevice](devices)
	if err != nil {
		return err
	}
	headers, err := copyDevices()
	if err != nil {
		return err
	}
	for index, header := range headers {
		tc := kernel.Clsact{Ifindex: int(index), Name: copyFilter}
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
	if err := (kernel.Clsact{Ifindex: int(index), Name: copyFilter}).Detach(d.Qdisc == 1); err != nil {
		return err
	}
	if err := devices.Delete(index); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// linkHeaders are the lengths in bytes of devices' link headers, where known, as
// dev_is_mac_header_xmit tells them apart (include/linux/if_arp.h).
var linkHeaders = map[string]uint32{"ether": 14, "loopback": 14, "none": 0, "void": 0, "ipip": 0, "tunnel6": 0, "sit": 0,
	"gre": 0, "ipgre": 0, "ip6gre": 0, "ppp": 0, "rawip": 0}

// copyDevices are the devices of this namespace on which packets for the host
// arrive, with the lengths of their link headers. What arrives at a port of a
// bridge or bond arrives once more at that.
func copyDevices() (map[uint32]uint32, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("listing devices: %w", err)
	}
	types := map[int]string{}
	for _, l := range links {
		types[l.Attrs().Index] = l.Type()
	}
	out := map[uint32]uint32{}
	for _, l := range links {
		a := l.Attrs()
		header, known := linkHeaders[a.EncapType]
		if known && (a.MasterIndex == 0 || types[a.MasterIndex] == "vrf") {
			out[uint32(a.Index)] = header
		}
	}
	return out, nil
}

// removeCopies takes a namespace's filters away, and then the pins by which they
// are found.
func removeCopies(l *kernel.WriteLock, scope string, o *kernel.Opened) error {
	if o == nil {
		return nil
	}
	ns, err := l.OpenScope("", scope)
	if err == nil {
		defer ns.Close()
		err = ns.Do(func() error {
			have, err := entries[uint32, bpf.CopyCopyDevice](o.Maps["devices"])
			for index, d := range have {
				err = errors.Join(err, dropFilter(o.Maps["devices"], index, d))
			}
			return err
		})
	}
	if err != nil && !errors.Is(err, ErrNetnsGone) { // with the namespace its devices went
		return err
	}
	return l.Remove(copyInstance(scope))
}

// syncAllCopies is syncCopies for every namespace.
func syncAllCopies(l *kernel.WriteLock) error {
	all, err := l.Instances(Name)
	if err != nil {
		return err
	}
	scopes := map[string]bool{}
	for _, i := range all {
		scopes[i.Scope] = scopes[i.Scope] || i.Scope != kernel.HostScope
	}
	for scope, is := range scopes {
		if is {
			if err := syncCopies(l, scope, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// addCopies tells what became of a service's copies.
func (s *ServiceState) addCopies(r *kernel.Root) {
	if s.pub.Service.Copy == "" {
		return
	}
	s.Copies = &Copies{To: s.pub.Service.Copy}
	o, err := r.Open(copyInstance(s.scope), "targets")
	if err != nil {
		if !s.Bypassed && s.Problem == "" {
			s.Problem = problemCopy
		}
		return
	}
	defer o.Close()
	for _, e := range s.eps {
		var v bpf.CopyCopyTo
		if e.Proto == unix.IPPROTO_UDP && o.Maps["targets"].Lookup(copyKey(e), &v) == nil {
			s.Copies.Copied += v.Copied
			s.Copies.Fragmented += v.Fragmented
			s.Copies.Failed += v.Failed
		}
	}
}

// problemCopy is the Problem of a service whose copies nobody makes.
const problemCopy = "its datagrams are not copied: the service that is to get them is not there, or the filters are missing; weir apply mends it"

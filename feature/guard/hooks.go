// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
	"github.com/weir-project/weir/kernel/probe"
)

// hooksName is the instance of a namespace with objects shared by all its guards: the links, and
// the maps for finding a guard. It is derived from the published guards by [reconcile].
const hooksName = "@hooks"

func hooksInstance(scope string) kernel.Instance { return shared.Name(scope, hooksName) }

// Pins of @hooks and of a guard.
const (
	pinListens = "listens"
	pinStates  = "states"
	pinEach    = "targets"
	pinState   = "state"
	linkCgroup = "cgroup"
	linkXDP    = "xdp_" // followed by the interface index
)

var sharedMaps = map[string]string{
	pinListens: bpf.GuardMapGuardListens, pinStates: bpf.GuardMapGuardStates, pinEach: bpf.GuardMapGuardTargets,
}

// hooks is a namespace's @hooks instance, open for writing.
type hooks struct {
	lock  *kernel.WriteLock
	scope string
	ns    *netns.Handle
	pins  *kernel.Opened
	blind bool // a guard of the namespace is unreadable: objects unused by the others may belong to it and stay
}

func (h *hooks) close() {
	if h.pins != nil {
		h.pins.Close()
	}
	h.ns.Close()
}

// openHooks opens a namespace's @hooks instance. If missing, it creates one without links, not yet
// in effect.
func openHooks(l *kernel.WriteLock, ref string, id netns.ID) (_ *hooks, err error) {
	h := &hooks{lock: l}
	if h.ns, err = netns.Find(ref, id); err != nil {
		return nil, err
	}
	h.scope = kernel.ScopeOf(h.ns)
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	h.pins, err = l.Open(hooksInstance(h.scope))
	if err == nil {
		return h, h.pins.Meta.RequireABI(hooksInstance(h.scope), abi)
	} else if !errors.Is(err, kernel.ErrNotExist) {
		return nil, err
	}
	spec, err := bpf.LoadGuard()
	if err != nil {
		return nil, err
	}
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{}}
	for pin, name := range sharedMaps {
		m, err := ebpf.NewMap(spec.Maps[name])
		if err != nil {
			return nil, fmt.Errorf("create map %s: %w", name, err)
		}
		defer m.Close()
		pins.Maps[pin] = m
	}
	if err := shared.Publish(l, hooksInstance(h.scope), instances.Form[struct{}]{Netns: h.ns, Pins: pins}); err != nil {
		return nil, err
	}
	kernel.Step("guard:hooks")
	h.pins, err = l.Open(hooksInstance(h.scope))
	return h, err
}

// programs loads the programs of some hooks, using the shared maps.
func (h *hooks) programs(at ...Hook) (*kernel.Collection, error) {
	c := constants{}
	if probe.PacketNetnsCookie.Check() == nil {
		cookie, err := h.ns.Cookie()
		if err != nil {
			return nil, err
		}
		c.netns = cookie
	}
	share := map[string]*ebpf.Map{}
	for pin, name := range sharedMaps {
		share[name] = h.pins.Maps[pin]
	}
	return load(c, share, at...)
}

// attachment is the location of a link, and the services whose guards need it.
type attachment struct {
	at       kernel.Attachment
	hook     Hook
	services []string
}

// attachments returns the links needed by guards, by name.
func (h *hooks) attachments(all []record, failed failures) map[string]attachment {
	want := map[string]attachment{}
	add := func(service, name string, at kernel.Attachment, hook Hook) {
		want[name] = attachment{at, hook, append(want[name].services, service)}
	}
	for _, g := range all {
		if len(g.Spec.Service.Interfaces) == 0 {
			root, err := units.CgroupRoot()
			if err != nil {
				failed.add(g.Name, err)
				continue
			}
			add(g.Name, linkCgroup, kernel.Cgroup{Path: root, Hook: ebpf.AttachCGroupInetIngress}, Cgroup)
			continue
		}
		for _, name := range g.Spec.Service.Interfaces {
			index, err := interfaceIndex(name)
			if errors.Is(err, errNoInterface) {
				continue // the status reports it; a later apply attaches the guard
			} else if err != nil {
				failed.add(g.Name, fmt.Errorf("interface %s: %w", name, err))
				continue
			}
			add(g.Name, linkXDP+strconv.Itoa(index), kernel.XDP{Ifindex: index, Device: name}, XDP)
		}
	}
	return want
}

var errNoInterface = errors.New("there is no such interface")

// interfaceIndex returns the index of an interface in the calling thread's namespace.
func interfaceIndex(name string) (int, error) {
	i, err := net.InterfaceByName(name)
	var oe *net.OpError
	if errors.As(err, &oe) && strings.Contains(oe.Err.Error(), "no such network interface") {
		return 0, errNoInterface
	} else if err != nil {
		return 0, err
	}
	return i.Index, nil
}

// reconcile makes a namespace's hooks match its published guards. Every change takes effect by it,
// and recovery after a kill uses it. It returns guards it could not put into effect in failed.
// These do not affect the others.
func reconcile(l *kernel.WriteLock, scope string) (failed failures, err error) {
	all, failed, err := readPublished(l.Root, scope)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		if len(failed) > 0 {
			return failed, nil
		}
		return nil, shared.Remove(l, hooksInstance(scope))
	}
	h, err := openHooks(l, all[0].Ref, all[0].ID())
	if err != nil {
		return failed, err
	}
	defer h.close()
	h.blind = len(failed) > 0
	// A guard is in place before packets find it, and removed after none can.
	if err := h.putStates(all, failed); err != nil {
		return failed, err
	}
	kernel.Step("guard:states")
	if err := h.putListens(all); err != nil {
		return failed, err
	}
	kernel.Step("guard:listens")
	return failed, h.ns.Do(func() error { return h.link(all, failed) })
}

// putStates stores every guard's maps for the programs, and its limits.
func (h *hooks) putStates(all []record, failed failures) error {
	for _, g := range all {
		if err := h.putState(g); err != nil {
			failed.add(g.Name, err)
		}
	}
	if h.blind {
		return nil
	}
	used := indexes(all)
	for i := range uint32(maxGuards) {
		if used[uint16(i)] {
			continue
		}
		for _, pin := range []string{pinStates, pinEach} {
			if err := h.pins.Maps[pin].Delete(i); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("remove guard %d: %w", i, err)
			}
		}
	}
	return nil
}

// indexes returns the used guard indexes.
func indexes(all []record) map[uint16]bool {
	used := map[uint16]bool{}
	for _, g := range all {
		used[g.Spec.Index] = true
	}
	return used
}

func (h *hooks) putState(g record) error {
	o, err := h.lock.Open(g.Instance)
	if err != nil {
		return err
	}
	defer o.Close()
	s, err := openState(o.Maps[pinState])
	if err != nil {
		return err
	}
	defer s.Close()
	if want := g.Spec.Service.limits(); s.Limits() != want.Layout() {
		s.SetLimits(want)
	}
	c := &kernel.Collection{Maps: map[string]*ebpf.Map{}}
	for pin, name := range sharedMaps {
		c.Maps[name] = h.pins.Maps[pin]
	}
	return put(c, uint32(g.Spec.Index), o.Maps[pinState], o.Maps[pinEach])
}

func (h *hooks) putListens(all []record) error {
	var to []destination
	for _, g := range all {
		to = append(to, g.Spec.destinations()...)
	}
	if h.blind {
		kept, err := foreign(h.pins.Maps[pinListens], indexes(all))
		if err != nil {
			return err
		}
		to = append(to, kept...)
	}
	want, err := listens(to)
	if err != nil {
		return err
	}
	return reconcileListens(h.pins.Maps[pinListens], want)
}

// destinations returns the guard's destinations.
func (p published) destinations() (out []destination) {
	at := uint16(atSockets)
	if len(p.Service.Interfaces) > 0 {
		at = atInterfaces
	}
	for _, e := range p.Service.udp() {
		out = append(out, destination{e.Prefix, e.Port, p.Index, at})
	}
	return out
}

// link attaches missing links and detaches unneeded ones. An occupied location fails only the
// guards in need of it.
func (h *hooks) link(all []record, failed failures) error {
	want := h.attachments(all, failed)
	have, err := h.pins.Links()
	if err != nil {
		return err
	}
	missing := maps.Clone(want)
	for _, name := range have {
		p, wanted := want[name]
		if wanted && h.attached(name, p.at) == nil {
			delete(missing, name)
			continue
		}
		if !wanted && h.blind {
			continue
		}
		if err := h.lock.RemoveLink(hooksInstance(h.scope), name); err != nil {
			return err
		}
	}
	for _, hook := range []Hook{Cgroup, XDP} { // a hook rejected by this kernel does not affect the other
		at := maps.Clone(missing)
		maps.DeleteFunc(at, func(_ string, p attachment) bool { return p.hook != hook })
		h.attach(hook, at, failed)
	}
	return nil
}

// attach attaches a hook's program at locations.
func (h *hooks) attach(hook Hook, at map[string]attachment, failed failures) {
	if len(at) == 0 {
		return
	}
	fail := func(p attachment, err error) {
		for _, service := range p.services {
			failed.add(service, err)
		}
	}
	c, err := h.programs(hook)
	if err != nil {
		for _, p := range at {
			fail(p, err)
		}
		return
	}
	defer c.Close()
	for _, name := range slices.Sorted(maps.Keys(at)) {
		ln, err := at[name].at.Attach(c.Programs[hook.program()])
		if err == nil {
			err = h.lock.AddLink(hooksInstance(h.scope), name, ln)
			ln.Close()
		}
		if err != nil {
			fail(at[name], err)
		}
	}
}

// attached returns an error if a pinned link is not attached at its location.
func (h *hooks) attached(name string, at kernel.Attachment) error {
	ln, err := h.pins.Link(name)
	if err != nil {
		return err
	}
	defer ln.Close()
	return at.Verify(ln)
}

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
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
)

// hooksName is the instance of a namespace that holds what all its guards share: the links, and the maps by which the
// programs find a guard. It follows from the guards that are published; sync makes it so.
const hooksName = "@hooks"

func hooksInstance(scope string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: Name, Name: hooksName}
}

func guardInstance(scope, service string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: Name, Name: service}
}

func scopeOf(ns *netns.Handle) string { return strconv.FormatUint(ns.Inode(), 10) }

// Pins of @hooks, and of a guard.
const (
	pinListens = "listens"
	pinStates  = "states"
	pinEach    = "targets"
	pinState   = "state"
	linkCgroup = "cgroup"
	linkXDP    = "xdp_" // and the interface's number
)

var sharedMaps = map[string]string{
	pinListens: guardMapGuardListens, pinStates: guardMapGuardStates, pinEach: guardMapGuardTargets,
}

// hooks is a namespace's @hooks, open for writing.
type hooks struct {
	lock  *kernel.WriteLock
	scope string
	ns    *netns.Handle
	pins  *kernel.Opened
}

func (h *hooks) close() {
	if h.pins != nil {
		h.pins.Close()
	}
	h.ns.Close()
}

// openHooks opens a namespace's @hooks, or makes it without a link: it decides nothing yet.
func openHooks(l *kernel.WriteLock, ref string, inode uint64) (_ *hooks, err error) {
	h := &hooks{lock: l, scope: strconv.FormatUint(inode, 10)}
	if h.ns, err = netns.Find(ref, inode); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	h.pins, err = l.Open(hooksInstance(h.scope))
	if !errors.Is(err, kernel.ErrNotExist) {
		return h, err
	}
	spec, err := loadGuard()
	if err != nil {
		return nil, err
	}
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{}}
	for pin, name := range sharedMaps {
		m, err := ebpf.NewMap(spec.Maps[name])
		if err != nil {
			return nil, fmt.Errorf("making the map %s: %w", name, err)
		}
		defer m.Close()
		pins.Maps[pin] = m
	}
	if err := l.Publish(hooksInstance(h.scope), h.meta(), pins); err != nil {
		return nil, err
	}
	kernel.Step("guard:hooks")
	h.pins, err = l.Open(hooksInstance(h.scope))
	return h, err
}

func (h *hooks) meta() kernel.Meta {
	m := kernel.Meta{ABI: ABI, Object: kernel.ObjectHash(_GuardBytes), Inode: h.ns.Inode(), Created: time.Now(), Version: Version}
	m.Cookie, _ = h.ns.Cookie() // 0 where the kernel has none
	return m
}

// programs loads the programs of some hooks over the shared maps.
func (h *hooks) programs(at ...Hook) (*kernel.Collection, error) {
	c := constants{}
	if kernel.PacketNetnsCookie.Check() == nil {
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

// place is where a link goes.
type place struct {
	at   kernel.Attachment
	hook Hook
}

// places are the links that guards need, by name.
func (h *hooks) places(guards []published) (map[string]place, error) {
	want := map[string]place{}
	for _, g := range guards {
		if len(g.Service.Interfaces) == 0 {
			root, err := units.CgroupRoot()
			if err != nil {
				return nil, err
			}
			want[linkCgroup] = place{kernel.Cgroup{Path: root, Hook: ebpf.AttachCGroupInetIngress}, Cgroup}
			continue
		}
		for _, name := range g.Service.Interfaces {
			index, err := ifindexOf(name)
			if errors.Is(err, errNoInterface) {
				continue // status says so; whoever applies again once it is there attaches
			} else if err != nil {
				return nil, err
			}
			want[linkXDP+strconv.Itoa(index)] = place{kernel.XDP{Ifindex: index, Device: name}, XDP}
		}
	}
	return want, nil
}

var errNoInterface = errors.New("there is no such interface")

// ifindexOf is the number of an interface of the calling thread's namespace.
func ifindexOf(name string) (int, error) {
	i, err := net.InterfaceByName(name)
	var oe *net.OpError
	if errors.As(err, &oe) && strings.Contains(oe.Err.Error(), "no such network interface") {
		return 0, errNoInterface
	} else if err != nil {
		return 0, err
	}
	return i.Index, nil
}

// sync makes a namespace's hooks those of its published guards. It is how every change takes effect, and how one that
// was killed is mended.
func sync(l *kernel.WriteLock, scope string) error {
	guards, err := readPublished(l.Root, scope)
	if err != nil {
		return err
	}
	if len(guards) == 0 {
		return l.Remove(hooksInstance(scope))
	}
	h, err := openHooks(l, guards[0].Netns, guards[0].Inode)
	if err != nil {
		return err
	}
	defer h.close()
	// A guard is there before a packet finds it, and gone after the last one did.
	if err := h.putStates(guards); err != nil {
		return err
	}
	kernel.Step("guard:states")
	if err := h.putListens(guards); err != nil {
		return err
	}
	kernel.Step("guard:listens")
	return h.ns.Do(func() error { return h.link(guards) })
}

// putStates puts every guard's maps where the programs find them, and its limits in force.
func (h *hooks) putStates(guards []published) error {
	used := map[uint32]bool{}
	for _, g := range guards {
		if err := h.putState(g); err != nil {
			return fmt.Errorf("guard of service %s: %w", g.Service.Name, err)
		}
		used[uint32(g.Index)] = true
	}
	for i := range uint32(maxGuards) {
		if used[i] {
			continue
		}
		for _, pin := range []string{pinStates, pinEach} {
			if err := h.pins.Maps[pin].Delete(i); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("taking guard %d out of place: %w", i, err)
			}
		}
	}
	return nil
}

func (h *hooks) putState(g published) error {
	o, err := h.lock.Open(guardInstance(h.scope, g.Service.Name))
	if err != nil {
		return err
	}
	defer o.Close()
	s, err := openState(o.Maps[pinState])
	if err != nil {
		return err
	}
	defer s.close()
	if s.limits() != g.Service.limits().layout() {
		s.setLimits(g.Service.limits())
	}
	c := &kernel.Collection{Maps: map[string]*ebpf.Map{}}
	for pin, name := range sharedMaps {
		c.Maps[name] = h.pins.Maps[pin]
	}
	return put(c, uint32(g.Index), o.Maps[pinState], o.Maps[pinEach])
}

func (h *hooks) putListens(guards []published) error {
	var all []destination
	for _, g := range guards {
		all = append(all, g.destinations()...)
	}
	want, err := listens(all)
	if err != nil {
		return err
	}
	return syncListens(h.pins.Maps[pinListens], want)
}

// destinations are what the guard is for.
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

// link attaches what is missing and detaches what nobody needs.
func (h *hooks) link(guards []published) error {
	want, err := h.places(guards)
	if err != nil {
		return err
	}
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
		if err := h.lock.RemoveLink(hooksInstance(h.scope), name); err != nil {
			return err
		}
	}
	if len(missing) == 0 {
		return nil
	}
	var at []Hook
	for _, p := range missing {
		if !slices.Contains(at, p.hook) {
			at = append(at, p.hook)
		}
	}
	c, err := h.programs(at...)
	if err != nil {
		return err
	}
	defer c.Close()
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		p := missing[name]
		ln, err := p.at.Attach(c.Programs[p.hook.program()])
		if err != nil {
			return err
		}
		err = h.lock.AddLink(hooksInstance(h.scope), name, ln)
		ln.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// attached says why a pinned link does not attach anything at its place.
func (h *hooks) attached(name string, at kernel.Attachment) error {
	ln, err := h.pins.Link(name)
	if err != nil {
		return err
	}
	defer ln.Close()
	return at.Verify(ln)
}

// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

var _ feature.Recoverer = Feature{}

// Recover implements feature.Recoverer. A service keeps its seed, its table and what
// operators changed; an engine keeps every map that is alive.
func (Feature) Recover(l *kernel.WriteLock, i kernel.Instance, lacks []string) (note string, err error) {
	if kind, ok := kindOf(i); ok {
		return recoverEngine(l, i, kind, lacks)
	}
	if kernel.ValidName(i.Name) {
		return "", recoverService(l, i)
	}
	return "made anew", l.Remove(i) // it follows from the services
}

// recoverEngine loads an engine's programs over the maps that are there, makes the others
// anew, and attaches the programs. Sync, which the mark asks for, fills what is new.
func recoverEngine(l *kernel.WriteLock, i kernel.Instance, kind Engine, lacks []string) (note string, err error) {
	lost := slices.DeleteFunc(slices.Clone(lacks), func(pin string) bool { return !strings.HasPrefix(pin, "map_") })
	if kind == EngineReuseport && len(lost) > 0 {
		return "made anew", dropReuse(l, i)
	}
	ns, err := l.OpenNetns(i)
	if err != nil {
		return "", err
	}
	defer ns.Close()
	rest, err := l.OpenRest(i)
	if err != nil {
		return "", err
	}
	defer rest.Close()
	if err := rest.Meta.RequireABI(i, ABI); err != nil {
		return "", err
	}
	bindings := slices.ContainsFunc(lost, func(pin string) bool { return strings.HasPrefix(pin, "map_bound_") })
	if err := reattachEngine(l, i, kind, ns, rest, bindings); err != nil {
		return "", fmt.Errorf("recovering %s: %w", i, err)
	}
	if bindings {
		note = "what was bound by hand is gone: weir steer bind, or weir steer replace"
	}
	return note, nil
}

// dropReuse removes an engine that cannot say which groups it has. Their sockets leave the
// arrays, for they can be in one only, and their programs leave the groups: to the new
// engine they would be somebody else's.
func dropReuse(l *kernel.WriteLock, i kernel.Instance) error {
	rest, err := l.OpenRest(i)
	if err != nil {
		return err
	}
	defer rest.Close()
	for _, name := range []string{"sockets", "holders"} {
		m := rest.Maps[name]
		if m == nil {
			continue
		}
		for k := range m.MaxEntries() {
			if err := m.Delete(k); err != nil && !gone(err) {
				return fmt.Errorf("emptying map_%s: %w", name, err)
			}
		}
	}
	if err := detachLost(l, i.Scope, rest.Maps["slots"]); err != nil {
		return err
	}
	return l.Remove(i)
}

// detachLost takes the programs that work by a lost engine's slots out of the groups of a
// namespace. Without the map there is none: a program keeps its maps.
func detachLost(l *kernel.WriteLock, scope string, slots *ebpf.Map) error {
	if slots == nil {
		return nil
	}
	ns, err := l.OpenScope("", scope)
	if err != nil {
		return err
	}
	defer ns.Close()
	programs, err := listGroups(ns)()
	if err != nil {
		return err
	}
	lost := map[ebpf.ProgramID]bool{}
	for _, id := range programs {
		if _, known := lost[id]; !known {
			lost[id] = usesMap(id, slots)
		}
	}
	var socks []sockdiag.Socket
	err = ns.Do(func() error {
		for _, proto := range []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			more, err := bound(proto, 0)
			if err != nil {
				return err
			}
			socks = append(socks, more...)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, s := range socks {
		id := programs[s.Cookie]
		if !lost[id] {
			continue
		}
		fd, err := service.DupSocket(s)
		if err != nil {
			continue // closed meanwhile: another socket of the group will do
		}
		err = kernel.ReuseportGroup{FD: fd, Name: keyOfSocket(s).String()}.Detach()
		pidfd.CloseDup(fd)
		if err != nil {
			return err
		}
		lost[id] = false // each group has a program of its own
	}
	return nil
}

// usesMap says whether a program works by a map.
func usesMap(id ebpf.ProgramID, m *ebpf.Map) bool {
	prog, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return false // it went meanwhile
	}
	defer prog.Close()
	return worksBy(prog, m)
}

// reattachEngine publishes an engine anew over the maps of rest. With bindings, the engine
// lost maps of its bindings.
func reattachEngine(l *kernel.WriteLock, i kernel.Instance, kind Engine, ns *netns.Handle, rest *kernel.Opened, bindings bool) error {
	room := roomOf(rest.Maps)
	if room == 0 && bindings {
		room = fewestBindings
	}
	share, err := unchanged(rest, kind, room)
	if err != nil {
		return err
	}
	c, err := loadPrograms(kind, room, share)
	if err != nil {
		return err
	}
	defer c.Close()
	e := &engine{lock: l, scope: i.Scope, kind: kind, pins: &kernel.Opened{Instance: i, Meta: rest.Meta, Maps: pinnedMaps(c)}}
	made, err := e.carryOwn(rest)
	defer func() {
		for _, m := range made {
			m.Close()
		}
	}()
	if err == nil {
		err = e.mark(true)
	}
	if err != nil {
		return err
	}
	links, err := attachEngine(kind, c, ns)
	for _, ln := range links {
		defer ln.Close()
	}
	if err != nil {
		return err
	}
	kernel.Step("steer:reattached")
	meta := rest.Meta
	meta.Object, meta.Version, meta.Created = hashOf(kind), Version, time.Now()
	if err := l.Publish(i, meta, kernel.Pins{Maps: e.pins.Maps, Links: links}); err != nil {
		return err
	}
	kernel.Step("steer:recovered")
	e, err = openEngine(l, i.Scope, kind) // which syncs
	if err != nil {
		return err
	}
	defer e.Close()
	if rest.Maps["exits"] != nil {
		return nil
	}
	return e.watchAll()
}

// watchAll has steer_exit withdraw the slots of all members when they exit.
func (e *engine) watchAll() error {
	for _, p := range e.services {
		for slot, row := range p.Rows {
			var s bpf.SteerSlot
			if err := e.pins.Maps["slots"].Lookup(row, &s); err != nil {
				return err
			}
			m := p.Service.Member(slot)
			if slotState(s.State) != stateAdmitted || s.Tgid == 0 || m != nil && m.Keep {
				continue
			}
			if err := errors.Join(e.forgetExits(row), e.watchExit(s.Tgid, row)); err != nil {
				return err
			}
		}
	}
	return nil
}

// recoverService publishes a service again as it was.
func recoverService(l *kernel.WriteLock, i kernel.Instance) error {
	p, err := readService(l.Root, i)
	if err != nil {
		return fmt.Errorf("recovering %s: %w", i, err)
	}
	e, err := openEngine(l, i.Scope, p.Engine)
	if errors.Is(err, kernel.ErrNotExist) {
		ns, nerr := l.OpenNetns(i)
		if nerr != nil {
			return nerr
		}
		defer ns.Close()
		if err = publishEngine(l, ns, p.Engine, 0); err == nil {
			e, err = openEngine(l, i.Scope, p.Engine)
		}
	}
	if err != nil {
		return err
	}
	defer e.Close()
	if err := e.mark(true); err != nil {
		return err
	}
	if err := e.publishService(p); err != nil {
		return err
	}
	kernel.Step("steer:service recovered")
	return e.sync()
}

// readRecorded reads a service whose pins are damaged: from what was recorded of it, and
// from the map that its engine holds.
func readRecorded(r *kernel.Root, i kernel.Instance) (*published, error) {
	meta, err := r.Recorded(i)
	if err == nil {
		err = meta.RequireABI(i, ABI)
	}
	if err != nil {
		return nil, err
	}
	p := &published{recorded: true}
	if err := json.Unmarshal(meta.Config, p); err != nil {
		return nil, fmt.Errorf("the record of service %s: %w", i.Name, err)
	}
	p.Service.Name, p.cookie = i.Name, meta.Cookie
	p.Service = p.Service.withDefaults()
	if p.table = heldTable(r, i.Scope, p); p.table == nil {
		p.table = Assign(p.Service.Slots)
		p.rebalance()
	}
	return p, nil
}

// heldTable is the table of a service in the map that its engine holds, or nil.
func heldTable(r *kernel.Root, scope string, p *published) []uint16 {
	o, err := r.Open(engineInstance(scope, p.Engine), "services")
	if err != nil {
		return nil
	}
	defer o.Close()
	var id ebpf.MapID
	if o.Maps["services"].Lookup(p.ID, &id) != nil {
		return nil
	}
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return nil
	}
	defer m.Close()
	var value bpf.SteerService
	if m.Lookup(uint32(0), &value) != nil {
		return nil
	}
	return slices.Clone(value.Bucket[:])
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// RecoverEngine loads an engine's programs over its remaining maps, creates the lost maps, and attaches the programs.
// It sets the mark, so the next Reconcile fills the new maps.
func RecoverEngine(l *kernel.WriteLock, i kernel.Instance, kind spec.Engine, lacks []string) (note string, err error) {
	lost := slices.DeleteFunc(slices.Clone(lacks), func(pin string) bool { return !strings.HasPrefix(pin, "map_") })
	if kind == spec.EngineReuseport && len(lost) > 0 {
		return "created again", DropReuse(l, i)
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
	if err := rest.Meta.RequireABI(i, record.ABI); err != nil {
		return "", err
	}
	bindings := slices.ContainsFunc(lost, func(pin string) bool { return strings.HasPrefix(pin, "map_bound_") })
	if err := reattachEngine(l, i, kind, ns, rest, bindings); err != nil {
		return "", fmt.Errorf("recover %s: %w", i, err)
	}
	if bindings {
		note = "bindings are lost: run weir bind add or weir bind replace"
	}
	return note, nil
}

// DropReuse removes an engine with unknown groups. It removes their sockets from the arrays, because a socket can be in
// only one array. It detaches their programs, because a new engine would treat them as foreign.
func DropReuse(l *kernel.WriteLock, i kernel.Instance) error {
	maps := map[string]*ebpf.Map{}
	for _, name := range []string{"sockets", "holders", "slots"} {
		if m, err := l.OpenMap(i, name); err == nil {
			defer m.Close()
			maps[name] = m
		}
	}
	for _, name := range []string{"sockets", "holders"} {
		m := maps[name]
		if m == nil {
			continue
		}
		for k := range m.MaxEntries() {
			if err := m.Delete(k); err != nil && !Gone(err) {
				return fmt.Errorf("empty map_%s: %w", name, err)
			}
		}
	}
	if err := detachLost(l, i.Scope, maps["slots"]); err != nil {
		return err
	}
	return l.Remove(i)
}

// detachLost detaches the programs that use a lost engine's slots from the groups of a namespace. Without the map no
// such program exists, because a program keeps its maps.
func detachLost(l *kernel.WriteLock, scope string, slots *ebpf.Map) error {
	if slots == nil {
		return nil
	}
	ns, err := l.OpenScope("", scope)
	if err != nil {
		return err
	}
	defer ns.Close()
	programs, err := ListGroups(ns)()
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
			more, err := Bound(proto, 0)
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
			continue // closed meanwhile: another socket of the group serves as well
		}
		err = hook.ReuseportGroup{FD: fd, Name: keyOfSocket(s).String()}.Detach()
		pidfd.CloseDup(fd)
		if err != nil {
			return err
		}
		lost[id] = false // each group has its own program
	}
	return nil
}

// usesMap reports whether a program uses a map.
func usesMap(id ebpf.ProgramID, m *ebpf.Map) bool {
	prog, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return false // unloaded meanwhile
	}
	defer prog.Close()
	return worksBy(prog, m)
}

// reattachEngine publishes an engine again over the maps of rest. With bindings, the engine lost maps of its bindings.
func reattachEngine(l *kernel.WriteLock, i kernel.Instance, kind spec.Engine, ns *netns.Handle, rest *kernel.Opened, bindings bool) error {
	room := Room(rest.Maps)
	if room == 0 && bindings {
		room = FewestBindings
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
	e := &Engine{Lock: l, Scope: i.Scope, Kind: kind, Pins: &kernel.Opened{Instance: i, Meta: rest.Meta, Maps: pinnedMaps(c)}}
	made, err := e.carryOwn(rest)
	defer func() {
		for _, m := range made {
			m.Close()
		}
	}()
	if err == nil {
		err = e.Mark(true)
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
	meta.Object, meta.Version, meta.Created = ObjectHash(kind), kernel.Version, time.Now()
	if err := l.Publish(i, meta, kernel.Pins{Maps: e.Pins.Maps, Links: links}); err != nil {
		return err
	}
	kernel.Step("steer:recovered")
	e, err = OpenEngine(l, i.Scope, kind) // reconciles
	if err != nil {
		return err
	}
	defer e.Close()
	if rest.Maps["exits"] != nil {
		return nil
	}
	return e.watchAll()
}

// watchAll makes steer_exit withdraw the slots of all members on their exit.
func (e *Engine) watchAll() error {
	for _, p := range e.Services {
		for slot, row := range p.Rows {
			var s bpf.SteerSlot
			if err := e.Pins.Maps["slots"].Lookup(row, &s); err != nil {
				return err
			}
			m := p.Service.Member(slot)
			if slots.RowState(s.State) != slots.Admitted || s.Tgid == 0 || m != nil && m.Keep {
				continue
			}
			if err := errors.Join(e.forgetExits(row), e.watchExit(s.Tgid, row)); err != nil {
				return err
			}
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"slices"
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

// reconcileGroups is reconcilePorts of this engine: groups come with their members, and
// go here with their service.
func (e *Engine) reconcileGroups() error {
	groups, err := e.groups()
	if err != nil {
		return err
	}
	have, bypassed := map[uint32]bool{}, map[uint32]bool{}
	for _, p := range e.Services {
		have[p.ID], bypassed[p.ID] = true, p.Bypassed
		if _, ok := groups[serviceMark(p.ID)]; !ok {
			if err := e.Pins.Maps["groups"].Put(serviceMark(p.ID), GroupValue{Service: p.ID}); err != nil {
				return err
			}
		}
	}
	led, joined := map[uint32]bool{}, map[uint32]int{}
	for k, v := range groups {
		led[v.Service] = true
		if k.Proto != 0 && v.Leaving == 0 {
			joined[v.Service]++
		}
		if k.Proto != 0 && (!have[v.Service] || bypassed[v.Service]) && !e.keeps(v.Service) {
			if err := e.dropGroup(k, v); err != nil {
				return err
			}
			kernel.Step("steer:port")
		}
	}
	for _, p := range e.Services {
		// Bypassed until now, maybe by a command that was killed while it took that back; or a command
		// was killed while the service left its groups. Sockets of both families are in one group, and
		// looked at once more for nothing.
		if !p.Bypassed && joined[p.ID] < len(p.Service.Endpoints()) {
			if err := e.rejoin(p); err != nil {
				return err
			}
		}
	}
	if err := e.dropLeaving(have); err != nil {
		return err
	}
	if err := e.ClearIDs(led); err != nil {
		return err
	}
	for k, v := range groups {
		if k.Proto == 0 && !have[v.Service] && !e.keeps(v.Service) {
			if err := e.Pins.Maps["groups"].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
		}
	}
	return nil
}

// dropLeaving ends what a killed command began: groups of services that stay which no member has joined again.
func (e *Engine) dropLeaving(have map[uint32]bool) error {
	groups, err := e.groups()
	if err != nil {
		return err
	}
	for k, v := range groups {
		if k.Proto == 0 || v.Leaving == 0 || !have[v.Service] {
			continue
		}
		if err := e.dropGroup(k, v); err != nil {
			return err
		}
	}
	return nil
}

// dropGroup leaves a group to the kernel's own choice: the holder's socket goes,
// which is not to be chosen, then the program, and last what tells of the group.
func (e *Engine) dropGroup(k GroupKey, v GroupValue) error {
	v.Leaving = 1
	if err := e.Pins.Maps["groups"].Put(k, v); err != nil {
		return err
	}
	kernel.Step("steer:leaving")
	if err := e.releaseSocketHolder(v.SocketHolder); err != nil {
		return err
	}
	kernel.Step("steer:released")
	ns, err := e.openNetns()
	if err == nil {
		err = detachGroup(ns, k, v.UID)
		ns.Close()
	}
	if err != nil && !errors.Is(err, slots.ErrNetnsGone) {
		return err
	}
	kernel.Step("steer:detached")
	if err := e.Pins.Maps["groups"].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// openNetns opens the engine's namespace by whatever leads to it.
func (e *Engine) openNetns() (*netns.Handle, error) {
	ref := ""
	for _, p := range e.Services {
		ref = p.Netns
	}
	return slots.OpenNetns(ref, e.Pins.Meta.ID())
}

// detachGroup detaches through any socket of the group. A group that has none is
// gone with its program.
func detachGroup(ns *netns.Handle, k GroupKey, uid uint32) error {
	return withGroup(ns, k, uid, hook.ReuseportGroup.Detach)
}

// withGroup has f act on a group through any socket of it, if it has one.
func withGroup(ns *netns.Handle, k GroupKey, uid uint32, f func(hook.ReuseportGroup) error) error {
	var socks []sockdiag.Socket
	err := ns.Do(func() (err error) { socks, err = Bound(k.Proto, k.Port); return err })
	if err != nil {
		return err
	}
	for _, s := range socks {
		if keyOfSocket(s) != k || s.UID != uid {
			continue
		}
		fd, err := service.DupSocket(s)
		if err != nil {
			continue // closed, or no longer shared: the next one will do
		}
		err = f(hook.ReuseportGroup{FD: fd, Name: k.String()})
		pidfd.CloseDup(fd)
		return err
	}
	return nil
}

// releaseSocketHolder has the holder close its socket of a group, and waits for it.
func (e *Engine) releaseSocketHolder(index uint32) error {
	for try := range 1000 { // ten seconds: a busy machine may not let it run
		var cookie uint64
		if e.Pins.Maps["holders"].Lookup(index, &cookie) != nil {
			return nil
		}
		if try%20 == 0 && !e.PokeSocketHolder() {
			return nil // it is dead, and its sockets with it
		}
		time.Sleep(10 * time.Millisecond)
	}
	return errors.New("the holder of reuseport groups does not let go of its sockets: end the process `weir steer hold` and try again")
}

// vacate empties a row, and takes an adoption's sockets from wherever an earlier
// form of the service had them: an array of reuseport sockets takes each once.
func (e *Engine) vacate(p *record.Service, row uint32, a *service.Adoption) error {
	sockets := e.Pins.Maps["sockets"]
	for i := range uint32(spec.MaxEndpoints) {
		if err := sockets.Delete(row*spec.MaxEndpoints + i); err != nil && !Gone(err) {
			return err
		}
	}
	rows := slices.Clone(p.Rows)
	if old := e.Services[p.Service.Name]; old != nil {
		rows = append(rows, old.Rows...)
	}
	for _, r := range rows {
		for i := range e.shared(r, a) {
			if err := sockets.Delete(r*spec.MaxEndpoints + i); err != nil && !Gone(err) {
				return err
			}
		}
	}
	return nil
}

// shared are the places of a row that hold sockets of an adoption.
func (e *Engine) shared(row uint32, a *service.Adoption) map[uint32]service.Adopted {
	out := map[uint32]service.Adopted{}
	for i := range uint32(spec.MaxEndpoints) {
		var cookie uint64
		if e.Pins.Maps["sockets"].Lookup(row*spec.MaxEndpoints+i, &cookie) != nil {
			continue
		}
		for _, s := range a.Sockets {
			if s.Socket.Cookie == cookie {
				out[i] = s
			}
		}
	}
	return out
}

// checkUnshared refuses sockets that serve another slot now. It is asked before
// anything changes: the row's own member must not lose it to a command that
// fails. What an empty slot was left with, anybody may have.
func (e *Engine) checkUnshared(p *record.Service, row uint32, a *service.Adoption) error {
	for slot, r := range p.Rows {
		var s bpf.SteerSlot
		if r == row {
			continue
		} else if err := e.Pins.Maps["slots"].Lookup(r, &s); err != nil {
			return err
		}
		if slots.RowState(s.State) != slots.Admitted {
			continue
		}
		for _, sock := range e.shared(r, a) {
			return fmt.Errorf("%w: %s of process %d serves slot %d already; with engine sk_reuseport a socket serves one slot: use sk_lookup, or run a daemon for each slot", ErrSocketInUse, sock.Endpoint, sock.PID, slot)
		}
	}
	return nil
}

// ErrSocketInUse says that a socket serves another slot.
var ErrSocketInUse = errors.New("socket is taken")

// noteCookies has nginx's connection ids lead to a slot: they carry the cookie
// of the socket that chose them. Those of sockets that are gone go.
func (e *Engine) noteCookies(p *record.Service, slot int, a *service.Adoption) error {
	m := e.Pins.Maps["cookies"]
	all, err := Entries[uint64, uint32](m)
	if err != nil {
		return err
	}
	live, used := map[uint64]bool{}, e.rows()
	for row := range uint32(spec.MaxRows) {
		if !used[row] && !e.Kept.Row(row) {
			continue
		}
		for i := range uint32(spec.MaxEndpoints) {
			var cookie uint64
			if e.Pins.Maps["sockets"].Lookup(row*spec.MaxEndpoints+i, &cookie) == nil {
				live[cookie] = true
			}
		}
	}
	for _, s := range a.Sockets {
		if s.Endpoint.Proto == unix.IPPROTO_UDP {
			live[s.Socket.Cookie] = true
			if err := m.Put(s.Socket.Cookie, uint32(slot)); err != nil {
				return err
			}
		}
	}
	for cookie := range all {
		if !live[cookie] {
			if err := m.Delete(cookie); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
		}
	}
	return nil
}

// ReleaseGroups takes the programs of all groups of a namespace away, and the
// sockets out of the arrays, which outlive their names while a process has them
// open.
func ReleaseGroups(l *kernel.WriteLock, scope string) (_ *Engine, err error) {
	e, err := OpenEngine(l, scope, spec.EngineReuseport)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			e.Close()
		}
	}()
	groups, err := e.groups()
	if err != nil {
		return nil, err
	}
	for k, v := range groups {
		if k.Proto == 0 {
			continue
		}
		if err := e.dropGroup(k, v); err != nil {
			return nil, err
		}
	}
	used := e.rows()
	for row := range uint32(spec.MaxRows) {
		if !used[row] && !e.Kept.Row(row) {
			continue
		}
		if err := e.clearRow(row, bpf.SteerSlot{}); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// groupsGone says whether a namespace without a link of ours is gone: no socket
// of it is left in our arrays, and nothing leads to it.
func groupsGone(l *kernel.WriteLock, i kernel.Instance) (bool, error) {
	o, err := l.Open(i, "slots", "holders", "groups")
	if err != nil {
		return false, err
	}
	defer o.Close()
	if err := o.Meta.RequireABI(i, record.ABI); err != nil {
		return false, err
	}
	groups, err := Entries[GroupKey, GroupValue](o.Maps["groups"])
	if err != nil {
		return false, err
	}
	for k, v := range groups {
		var cookie uint64
		if k.Proto != 0 && o.Maps["holders"].Lookup(v.SocketHolder, &cookie) == nil {
			return false, nil
		}
	}
	ref := ""
	services, _, err := record.ReadAll(l.Root, i.Scope, spec.EngineReuseport)
	if err != nil {
		return false, err
	}
	for _, p := range services {
		ref = p.Netns
	}
	ns, err := slots.OpenNetns(ref, o.Meta.ID())
	if errors.Is(err, slots.ErrNetnsGone) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	defer ns.Close()
	cookie, err := ns.Cookie()
	return err == nil && o.Meta.Cookie != 0 && cookie != o.Meta.Cookie, nil
}

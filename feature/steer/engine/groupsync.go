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

// reconcileGroups is the counterpart of reconcilePorts for engine sk_reuseport. Groups are created when members join.
// They are removed here with their service.
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
		// Groups are missing after a bypass, or after a kill while the service left or rejoined its groups. A
		// dual-stack socket is one group for two endpoints, so its service rejoins each time without effect.
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

// dropLeaving completes the removal of groups by a killed command, for services that remain and groups that no member
// has joined again.
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

// dropGroup returns a group to the kernel's own choice. It releases the holder's socket, which must not be chosen, then
// detaches the program, and finally deletes the entry of the group.
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

// openNetns opens the engine's namespace through any reference.
func (e *Engine) openNetns() (*netns.Handle, error) {
	ref := ""
	for _, p := range e.Services {
		ref = p.Netns
	}
	return slots.OpenNetns(ref, e.Pins.Meta.ID())
}

// detachGroup detaches the program through any socket of the group. Without sockets neither group nor program exists.
func detachGroup(ns *netns.Handle, k GroupKey, uid uint32) error {
	return withGroup(ns, k, uid, hook.ReuseportGroup.Detach)
}

// withGroup calls f with any socket of the group. Without sockets it does nothing.
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
			continue // closed, or no longer shared: try the next socket
		}
		err = f(hook.ReuseportGroup{FD: fd, Name: k.String()})
		pidfd.CloseDup(fd)
		return err
	}
	return nil
}

// releaseSocketHolder makes the holder close its socket of a group, and waits for it.
func (e *Engine) releaseSocketHolder(index uint32) error {
	for try := range 1000 { // 10 s: a busy machine may delay the holder
		var cookie uint64
		if e.Pins.Maps["holders"].Lookup(index, &cookie) != nil {
			return nil
		}
		if try%20 == 0 && !e.PokeSocketHolder() {
			return nil // the holder has exited, and its sockets are closed
		}
		time.Sleep(10 * time.Millisecond)
	}
	return errors.New("the socket holder does not release its socket: end the process `weir steer hold` and try again")
}

// vacate empties a row. It also removes an adoption's sockets from the rows of the service's previous form, because a
// reuseport array accepts each socket only once.
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

// shared returns the entries of a row with sockets of an adoption, by endpoint.
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

// checkUnshared rejects sockets in use by another slot. It runs before any change, so a failing command does not cost
// the other slot its member. Sockets of an empty slot may be reused.
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
			return fmt.Errorf("%w: %s of process %d already serves slot %d; with engine sk_reuseport a socket serves one slot: use sk_lookup, or run a daemon for each slot", ErrSocketInUse, sock.Endpoint, sock.PID, slot)
		}
	}
	return nil
}

// ErrSocketInUse means that a socket serves another slot.
var ErrSocketInUse = errors.New("socket in use")

// noteCookies maps nginx's connection ids to a slot. They contain the cookie of the worker's socket. It also removes
// the cookies of closed sockets.
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

// ReleaseGroups detaches the programs of all groups of a namespace and removes the sockets from the arrays. An unpinned
// array lives on while a process has it open, and would keep the sockets.
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

// groupsGone reports whether the namespace of an engine sk_reuseport is gone. The engine has no link to ask. The namespace
// is gone if weir's arrays contain none of its sockets and nothing refers to it.
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

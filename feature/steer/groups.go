// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Engine sk_reuseport. Sockets of one user that are bound to one address and
// port with SO_REUSEPORT form a group; the program attached to it chooses among
// them. Every member's socket for an endpoint is in the same group. A group and
// its program last as long as it has a socket, so a process of weir's, the
// holder, keeps one in each: members may all die and return, and meet the
// program. Which groups there are is in map_groups; it is also what the holder
// works by.

// ErrNotShared says that a socket cannot be in a group.
var ErrNotShared = errors.New("socket does not share its port")

// ErrForeign says that somebody else's program chooses in a group.
var ErrForeign = errors.New("another program is attached")

// groupKey is what sockets of a group have in common, beside their owner.
type groupKey struct {
	Proto  uint8 // 0: no group, but the mark that a service exists; its id is in Port
	Family uint8
	V6Only uint8
	_      uint8
	Port   uint16 // host byte order
	_      uint16
	Addr   [16]byte
}

// groupValue is what its program was made for.
type groupValue struct {
	Service  uint32    // index into steer_services
	Endpoint [2]uint32 // of IPv4 and IPv6 packets
	Holder   uint32    // index into steer_holders
	UID      uint32    // of the members
	Program  uint32    // id
	Leaving  uint32    // 1 while the group is given up: the holder is to leave it

	Endpoints uint32 // of the service
}

const maxGroups = MaxServices * maxEndpoints

func groupMaps() []*ebpf.MapSpec {
	return []*ebpf.MapSpec{
		{Name: "steer_groups", Type: ebpf.Hash, KeySize: 24, ValueSize: 32, MaxEntries: maxGroups + MaxServices, Flags: unix.BPF_F_NO_PREALLOC},
		{Name: "steer_holder", Type: ebpf.Array, KeySize: 4, ValueSize: 16, MaxEntries: 1},
	}
}

func serviceMark(id uint32) groupKey { return groupKey{Port: uint16(id)} }

// keyOfSocket is the group that a bound socket is in.
func keyOfSocket(s sockdiag.Socket) groupKey {
	k := groupKey{Proto: s.Proto, Family: s.Family, Port: s.Local.Port(), Addr: s.Local.Addr().As16()}
	if s.Family == unix.AF_INET6 && s.V6Only {
		k.V6Only = 1
	}
	return k
}

func (k groupKey) addr() netip.Addr {
	a := netip.AddrFrom16(k.Addr)
	if k.Family == unix.AF_INET {
		return a.Unmap()
	}
	return a
}

func (k groupKey) String() string {
	proto := "udp"
	if k.Proto == unix.IPPROTO_TCP {
		proto = "tcp"
	}
	if k.V6Only != 0 {
		proto += "6"
	}
	return fmt.Sprintf("%s %s", proto, netip.AddrPortFrom(k.addr(), k.Port))
}

func (e *engine) groups() (map[groupKey]groupValue, error) {
	return entries[groupKey, groupValue](e.pins.Maps["groups"])
}

// join has every socket of an adoption's in a group with the service's program,
// and the holder in it too. at is where each endpoint's socket will be.
func (e *engine) join(p *published, row uint32, a *service.Adoption, ns *netns.Handle) (at [maxEndpoints]uint8, err error) {
	for i, s := range a.Sockets {
		first := slices.IndexFunc(a.Sockets, func(o service.Adopted) bool { return o.Socket.Cookie == s.Socket.Cookie })
		at[i] = uint8(first)
	}
	groups, err := e.groups()
	if err != nil {
		return at, err
	}
	for i, s := range a.Sockets {
		if int(at[i]) != i {
			continue
		}
		v := groupValue{Service: p.ID, Holder: p.ID*maxEndpoints + uint32(i), UID: s.Socket.UID, Endpoints: uint32(len(a.Sockets))}
		v.Endpoint = [2]uint32{uint32(i), uint32(i)} // a group of one family sees no other
		for j := range a.Sockets {
			if at[j] == uint8(i) {
				v.Endpoint[familyIndex(a.Sockets[j].Endpoint.Family)] = uint32(j)
			}
		}
		if err := e.joinOne(p, row, s, v, groups, ns); err != nil {
			return at, err
		}
	}
	return at, e.startHolder()
}

func familyIndex(family uint8) int {
	if family == unix.AF_INET6 {
		return 1
	}
	return 0
}

func (e *engine) joinOne(p *published, row uint32, s service.Adopted, v groupValue, groups map[groupKey]groupValue, ns *netns.Handle) error {
	if on, err := unix.GetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_REUSEPORT); err != nil || on == 0 {
		return fmt.Errorf("%w: process %d opened %s without SO_REUSEPORT: use engine sk_lookup, or a daemon that shares its port", ErrNotShared, s.PID, s.Endpoint)
	}
	key := keyOfSocket(s.Socket)
	if err := e.alike(p, row, key, v, groups); err != nil {
		return err
	}
	group := kernel.ReuseportGroup{FD: s.FD, Name: key.String()}
	have, ok := groups[key]
	if err := e.refuseForeign(p, key, s, ns); err != nil {
		return err
	}
	v.Program = have.Program
	if !ok || have.Service != v.Service || have.Endpoint != v.Endpoint || have.Endpoints != v.Endpoints || have.Holder != v.Holder {
		v.Program = 0
	}
	prog, err := e.groupProgram(v)
	if err != nil {
		return err
	}
	defer prog.Close()
	// Also where it is attached already: a group that died and came back has none.
	if err := group.Attach(prog); err != nil {
		return err
	}
	kernel.Step("steer:attached")
	info, err := prog.Info()
	if err != nil {
		return err
	}
	id, _ := info.ID()
	v.Program = uint32(id)
	if ok && have == v {
		return nil
	}
	groups[key] = v
	return e.pins.Maps["groups"].Put(key, v)
}

// alike refuses a member whose sockets are cut differently from those of the
// others: packets would only ever reach one of the two groups. What nobody uses
// any more goes.
func (e *engine) alike(p *published, row uint32, key groupKey, v groupValue, groups map[groupKey]groupValue) error {
	for k, o := range groups {
		if o.Service != v.Service || k.Proto == 0 || k == key && o.UID == v.UID || !overlap(k, key) {
			continue
		}
		others, err := e.admittedOthers(p, row)
		if err != nil {
			return err
		}
		if others {
			return fmt.Errorf("%w: it is bound as %s of user %d, those of the other slots as %s of user %d: give all members the same addresses, families and user", ErrNotShared, key, v.UID, k, o.UID)
		}
		if err := e.dropGroup(k, o); err != nil {
			return err
		}
		delete(groups, k)
	}
	return nil
}

// overlap says whether packets for one group could be for the other.
func overlap(a, b groupKey) bool {
	if a.Proto != b.Proto || a.Port != b.Port {
		return false
	}
	if a.Family != b.Family {
		six := a
		if b.Family == unix.AF_INET6 {
			six = b
		}
		if six.V6Only != 0 {
			return false
		}
	}
	x, y := a.addr(), b.addr()
	return x.IsUnspecified() || y.IsUnspecified() || x == y
}

// admittedOthers says whether another slot of the service has a member.
func (e *engine) admittedOthers(p *published, row uint32) (bool, error) {
	for _, r := range p.Rows {
		var s steerSlot
		if err := e.pins.Maps["slots"].Lookup(r, &s); err != nil {
			return false, err
		}
		if r != row && slotState(s.State) == stateAdmitted {
			return true, nil
		}
	}
	return false, nil
}

// groupProgram is the program of a group: the one that runs, or a new one.
func (e *engine) groupProgram(v groupValue) (*ebpf.Program, error) {
	if v.Program != 0 {
		if prog, err := ebpf.NewProgramFromID(ebpf.ProgramID(v.Program)); err == nil {
			if e.oursNow(prog) {
				return prog, nil
			}
			prog.Close()
		}
	}
	return loadGroupProgram(e.pins, v)
}

// oursNow says whether a program works by this engine's maps: ids are reused.
func (e *engine) oursNow(prog *ebpf.Program) bool {
	info, err := prog.Info()
	if err != nil {
		return false
	}
	used, ok := info.MapIDs()
	slots, err := e.pins.Maps["slots"].Info()
	if !ok || err != nil {
		return false
	}
	id, _ := slots.ID()
	return slices.Contains(used, id)
}

// loadGroupProgram loads the program with a group's constants.
func loadGroupProgram(pins *kernel.Opened, v groupValue) (*ebpf.Program, error) {
	spec, err := loadReuse()
	if err != nil {
		return nil, err
	}
	constant := struct {
		Service  uint32
		Endpoint [2]uint32
		Holder   uint32
		Count    uint32
	}{v.Service, v.Endpoint, v.Holder, v.Endpoints}
	if err := spec.Variables[reuseVarSteerGroup].Set(constant); err != nil {
		return nil, err
	}
	share := map[string]*ebpf.Map{}
	for name, m := range pins.Maps {
		if _, ok := spec.Maps["steer_"+name]; ok {
			share["steer_"+name] = m
		}
	}
	var first error
	// Before Linux 5.14 nobody asks where a queue goes, and the second form is not known.
	for _, name := range []string{reuseProgSteerMigrate, reuseProgSteerReuse} {
		c, err := kernel.Load(spec, []string{name}, share)
		if err == nil {
			prog := c.Programs[name]
			c.Programs[name] = nil
			delete(c.Programs, name)
			c.Close()
			return prog, nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

// syncGroups is syncPorts of this engine: groups come with their members, and
// go here with their service.
func (e *engine) syncGroups() error {
	groups, err := e.groups()
	if err != nil {
		return err
	}
	have, bypassed := map[uint32]bool{}, map[uint32]bool{}
	for _, p := range e.services {
		have[p.ID], bypassed[p.ID] = true, p.Bypassed
		if _, ok := groups[serviceMark(p.ID)]; !ok {
			if err := e.pins.Maps["groups"].Put(serviceMark(p.ID), groupValue{Service: p.ID}); err != nil {
				return err
			}
		}
	}
	led, joined := map[uint32]bool{}, map[uint32]int{}
	for k, v := range groups {
		led[v.Service] = true
		if k.Proto != 0 {
			joined[v.Service]++
		}
		if k.Proto != 0 && (!have[v.Service] || bypassed[v.Service]) {
			if err := e.dropGroup(k, v); err != nil {
				return err
			}
			kernel.Step("steer:port")
		}
	}
	for _, p := range e.services {
		// Bypassed until now, maybe by a command that was killed while it took that back. Sockets
		// of both families are in one group, and looked at once more for nothing.
		if !p.Bypassed && joined[p.ID] < len(p.Service.Endpoints()) {
			if err := e.rejoin(p); err != nil {
				return err
			}
		}
	}
	if err := e.clearIDs(led); err != nil {
		return err
	}
	for k, v := range groups {
		if k.Proto == 0 && !have[v.Service] {
			if err := e.pins.Maps["groups"].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
		}
	}
	return nil
}

// dropGroup leaves a group to the kernel's own choice: the holder's socket goes,
// which is not to be chosen, then the program, and last what tells of the group.
func (e *engine) dropGroup(k groupKey, v groupValue) error {
	v.Leaving = 1
	if err := e.pins.Maps["groups"].Put(k, v); err != nil {
		return err
	}
	kernel.Step("steer:leaving")
	if err := e.releaseHolder(v.Holder); err != nil {
		return err
	}
	kernel.Step("steer:released")
	ns, err := e.openNetns()
	if err == nil {
		err = detachGroup(ns, k, v.UID)
		ns.Close()
	}
	if err != nil && !errors.Is(err, ErrNetnsGone) {
		return err
	}
	kernel.Step("steer:detached")
	if err := e.pins.Maps["groups"].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// openNetns opens the engine's namespace by whatever leads to it.
func (e *engine) openNetns() (*netns.Handle, error) {
	ref := ""
	for _, p := range e.services {
		ref = p.Netns
	}
	return openNetns(ref, e.pins.Meta.Inode)
}

// detachGroup detaches through any socket of the group. A group that has none is
// gone with its program.
func detachGroup(ns *netns.Handle, k groupKey, uid uint32) error {
	return withGroup(ns, k, uid, kernel.ReuseportGroup.Detach)
}

// withGroup has f act on a group through any socket of it, if it has one.
func withGroup(ns *netns.Handle, k groupKey, uid uint32, f func(kernel.ReuseportGroup) error) error {
	var socks []sockdiag.Socket
	err := ns.Do(func() (err error) { socks, err = bound(k.Proto, k.Port); return err })
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
		err = f(kernel.ReuseportGroup{FD: fd, Name: k.String()})
		unix.Close(fd)
		return err
	}
	return nil
}

// releaseHolder has the holder close its socket of a group, and waits for it.
func (e *engine) releaseHolder(index uint32) error {
	for try := range 200 {
		var cookie uint64
		if e.pins.Maps["holders"].Lookup(index, &cookie) != nil {
			return nil
		}
		if try%20 == 0 && !e.pokeHolder() {
			return nil // it is dead, and its sockets with it
		}
		time.Sleep(10 * time.Millisecond)
	}
	return errors.New("the holder of reuseport groups does not let go of its sockets: end the process `weir steer hold` and try again")
}

// vacate empties a row, and takes an adoption's sockets from wherever an earlier
// form of the service had them: an array of reuseport sockets takes each once.
func (e *engine) vacate(p *published, row uint32, a *service.Adoption) error {
	sockets := e.pins.Maps["sockets"]
	for i := range uint32(maxEndpoints) {
		if err := sockets.Delete(row*maxEndpoints + i); err != nil && !gone(err) {
			return err
		}
	}
	rows := slices.Clone(p.Rows)
	if old := e.services[p.Service.Name]; old != nil {
		rows = append(rows, old.Rows...)
	}
	for _, r := range rows {
		for i := range e.shared(r, a) {
			if err := sockets.Delete(r*maxEndpoints + i); err != nil && !gone(err) {
				return err
			}
		}
	}
	return nil
}

// shared are the places of a row that hold sockets of an adoption.
func (e *engine) shared(row uint32, a *service.Adoption) map[uint32]service.Adopted {
	out := map[uint32]service.Adopted{}
	for i := range uint32(maxEndpoints) {
		var cookie uint64
		if e.pins.Maps["sockets"].Lookup(row*maxEndpoints+i, &cookie) != nil {
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

// taken refuses sockets that serve another slot now. It is asked before
// anything changes: the row's own member must not lose it to a command that
// fails. What an empty slot was left with, anybody may have.
func (e *engine) taken(p *published, row uint32, a *service.Adoption) error {
	for slot, r := range p.Rows {
		var s steerSlot
		if r == row {
			continue
		} else if err := e.pins.Maps["slots"].Lookup(r, &s); err != nil {
			return err
		}
		if slotState(s.State) != stateAdmitted {
			continue
		}
		for _, sock := range e.shared(r, a) {
			return fmt.Errorf("%w: %s of process %d serves slot %d already; with engine sk_reuseport a socket serves one slot: use sk_lookup, or run a daemon for each slot", ErrSlotTaken, sock.Endpoint, sock.PID, slot)
		}
	}
	return nil
}

// ErrSlotTaken says that a socket serves another slot.
var ErrSlotTaken = errors.New("socket is taken")

// noteCookies has nginx's connection ids lead to a slot: they carry the cookie
// of the socket that chose them. Those of sockets that are gone go.
func (e *engine) noteCookies(p *published, slot int, a *service.Adoption) error {
	m := e.pins.Maps["cookies"]
	all, err := entries[uint64, uint32](m)
	if err != nil {
		return err
	}
	live := map[uint64]bool{}
	for _, o := range e.services {
		for _, row := range o.Rows {
			for i := range uint32(maxEndpoints) {
				var cookie uint64
				if e.pins.Maps["sockets"].Lookup(row*maxEndpoints+i, &cookie) == nil {
					live[cookie] = true
				}
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

// releaseGroups takes the programs of all groups of a namespace away, and the
// sockets out of the arrays, which outlive their names while a process has them
// open.
func releaseGroups(l *kernel.WriteLock, scope string) (_ *engine, err error) {
	e, err := openEngine(l, scope, EngineReuseport)
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
	for _, p := range e.services {
		for _, row := range p.Rows {
			if err := e.clearRow(row, steerSlot{}); err != nil {
				return nil, err
			}
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
	groups, err := entries[groupKey, groupValue](o.Maps["groups"])
	if err != nil {
		return false, err
	}
	for k, v := range groups {
		var cookie uint64
		if k.Proto != 0 && o.Maps["holders"].Lookup(v.Holder, &cookie) == nil {
			return false, nil
		}
	}
	ref := ""
	services, err := readServices(l.Root, i.Scope, EngineReuseport)
	if err != nil {
		return false, err
	}
	for _, p := range services {
		ref = p.Netns
	}
	ns, err := openNetns(ref, o.Meta.Inode)
	if errors.Is(err, ErrNetnsGone) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	defer ns.Close()
	cookie, err := ns.Cookie()
	return err == nil && o.Meta.Cookie != 0 && cookie != o.Meta.Cookie, nil
}

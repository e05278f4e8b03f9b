// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Engine sk_reuseport. Sockets of one user bound to the same address and port with SO_REUSEPORT form a group. The
// program attached to the group chooses among them. Every member's socket for an endpoint is in the same group. A group
// and its program exist as long as the group has a socket. Therefore the socket holder, a process of weir, keeps one
// socket in each group. All members may exit and return, and still find the program. map_groups lists the groups, also
// for the holder.

// errNotShared means that a socket cannot join a group.
var errNotShared = errors.New("socket does not share its port")

// errForeign means that another program is attached to a group.
var errForeign = errors.New("another program is attached")

// GroupKey is the common property of a group's sockets, except their owner.
type GroupKey struct {
	Proto  uint8 // 0: not a group, but the mark of a service with its id in Port
	Family uint8
	V6Only uint8
	_      uint8
	Port   uint16 // host byte order
	_      uint16
	Addr   [16]byte
}

// GroupValue describes a group's program.
type GroupValue struct {
	Service      uint32    // index into steer_services
	Endpoint     [2]uint32 // of IPv4 and IPv6 packets
	SocketHolder uint32    // index into steer_holders
	UID          uint32    // of the members
	Program      uint32    // program id
	Leaving      uint32    // 1: the group is being removed, and the holder must leave it

	Endpoints uint32 // of the service
}

const maxGroups = spec.MaxServices * spec.MaxEndpoints

func groupMaps() []*ebpf.MapSpec {
	return []*ebpf.MapSpec{
		{Name: "steer_groups", Type: ebpf.Hash, KeySize: 24, ValueSize: 32, MaxEntries: maxGroups + spec.MaxServices, Flags: unix.BPF_F_NO_PREALLOC},
		{Name: "steer_holder", Type: ebpf.Array, KeySize: 4, ValueSize: 16, MaxEntries: 1},
	}
}

func serviceMark(id uint32) GroupKey { return GroupKey{Port: uint16(id)} }

// keyOfSocket returns the group of a bound socket.
func keyOfSocket(s sockdiag.Socket) GroupKey {
	k := GroupKey{Proto: s.Proto, Family: s.Family, Port: s.Local.Port(), Addr: s.Local.Addr().As16()}
	if s.Family == unix.AF_INET6 && s.V6Only {
		k.V6Only = 1
	}
	return k
}

// Address returns the group's address. The unspecified address means all addresses of the family.
func (k GroupKey) Address() netip.Addr {
	a := netip.AddrFrom16(k.Addr)
	if k.Family == unix.AF_INET {
		return a.Unmap()
	}
	return a
}

// String returns the group's protocol and address.
func (k GroupKey) String() string {
	proto := "udp"
	if k.Proto == unix.IPPROTO_TCP {
		proto = "tcp"
	}
	if k.V6Only != 0 {
		proto += "6"
	}
	return fmt.Sprintf("%s %s", proto, netip.AddrPortFrom(k.Address(), k.Port))
}

func (e *Engine) groups() (map[GroupKey]GroupValue, error) {
	return Entries[GroupKey, GroupValue](e.Pins.Maps["groups"])
}

// join puts every socket of an adoption into a group with the service's program and a socket of the holder. at maps
// each endpoint to the endpoint index of its socket's entry.
func (e *Engine) join(p *record.Service, row uint32, a *service.Adoption, ns *netns.Handle) (at [spec.MaxEndpoints]uint8, err error) {
	for i, s := range a.Sockets {
		first := slices.IndexFunc(a.Sockets, func(o service.Adopted) bool { return o.Socket.Cookie == s.Socket.Cookie })
		at[i] = uint8(first)
	}
	groups, err := e.groups()
	if err != nil {
		return at, err
	}
	programs := ListGroups(ns)
	for i, s := range a.Sockets {
		if int(at[i]) != i {
			continue
		}
		v := GroupValue{Service: p.ID, SocketHolder: p.ID*spec.MaxEndpoints + uint32(i), UID: s.Socket.UID, Endpoints: uint32(len(a.Sockets))}
		v.Endpoint = [2]uint32{uint32(i), uint32(i)} // a group of one family receives no packets of the other
		for j := range a.Sockets {
			if at[j] == uint8(i) {
				v.Endpoint[familyIndex(a.Sockets[j].Endpoint.Family)] = uint32(j)
			}
		}
		if err := e.joinOne(p, row, s, v, groups, programs); err != nil {
			return at, err
		}
	}
	return at, e.StartSocketHolder()
}

func familyIndex(family uint8) int {
	if family == unix.AF_INET6 {
		return 1
	}
	return 0
}

func (e *Engine) joinOne(p *record.Service, row uint32, s service.Adopted, v GroupValue, groups map[GroupKey]GroupValue, programs groupList) error {
	if on, err := unix.GetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_REUSEPORT); err != nil || on == 0 {
		return fmt.Errorf("%w: process %d opened %s without SO_REUSEPORT: use engine sk_lookup, or a daemon that shares its port", errNotShared, s.PID, s.Endpoint)
	}
	key := keyOfSocket(s.Socket)
	if err := e.alike(p, row, key, v, groups); err != nil {
		return err
	}
	group := hook.ReuseportGroup{FD: s.FD, Name: key.String()}
	have, ok := groups[key]
	if ok && have.Service != v.Service && e.keeps(have.Service) {
		return fmt.Errorf("%w: %s is in the group of an unreadable service", errNotShared, s.Endpoint)
	}
	if err := e.refuseForeign(p, key, s, programs); err != nil {
		return err
	}
	v.Program = have.Program
	if !ok || have.Service != v.Service || have.Endpoint != v.Endpoint || have.Endpoints != v.Endpoints || have.SocketHolder != v.SocketHolder {
		v.Program = 0
	}
	prog, err := e.groupProgram(v)
	if err != nil {
		return err
	}
	defer prog.Close()
	// Attach again in any case: a group that was closed and opened again has no program.
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
	return e.Pins.Maps["groups"].Put(key, v)
}

// alike rejects a member with sockets bound differently from the other members' sockets. The kernel would otherwise
// send all packets to only one of the groups. It removes groups that no admitted member uses.
func (e *Engine) alike(p *record.Service, row uint32, key GroupKey, v GroupValue, groups map[GroupKey]GroupValue) error {
	for k, o := range groups {
		if o.Service != v.Service || k.Proto == 0 || k == key && o.UID == v.UID || !overlap(k, key) {
			continue
		}
		others, err := e.admittedOthers(p, row)
		if err != nil {
			return err
		}
		if others {
			return fmt.Errorf("%w: it is bound as %s of user %d, the other slots as %s of user %d: give all members the same addresses, families and user", errNotShared, key, v.UID, k, o.UID)
		}
		if err := e.dropGroup(k, o); err != nil {
			return err
		}
		delete(groups, k)
	}
	return nil
}

// overlap reports whether both groups can match the same packet.
func overlap(a, b GroupKey) bool {
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
	x, y := a.Address(), b.Address()
	return x.IsUnspecified() || y.IsUnspecified() || x == y
}

// admittedOthers reports whether another slot of the service has a member.
func (e *Engine) admittedOthers(p *record.Service, row uint32) (bool, error) {
	for _, r := range p.Rows {
		var s bpf.SteerSlot
		if err := e.Pins.Maps["slots"].Lookup(r, &s); err != nil {
			return false, err
		}
		if r != row && slots.RowState(s.State) == slots.Admitted {
			return true, nil
		}
	}
	return false, nil
}

// groupProgram returns the current program of a group, or a new one.
func (e *Engine) groupProgram(v GroupValue) (*ebpf.Program, error) {
	if v.Program != 0 {
		if prog, err := ebpf.NewProgramFromID(ebpf.ProgramID(v.Program)); err == nil {
			if e.oursNow(prog) {
				return prog, nil
			}
			prog.Close()
		}
	}
	return LoadGroupProgram(e.Pins, v)
}

// oursNow reports whether a program uses this engine's maps. The kernel reuses program ids.
func (e *Engine) oursNow(prog *ebpf.Program) bool { return worksBy(prog, e.Pins.Maps["slots"]) }

// worksBy reports whether a program uses a map.
func worksBy(prog *ebpf.Program, m *ebpf.Map) bool {
	info, err := prog.Info()
	if err != nil {
		return false
	}
	used, ok := info.MapIDs()
	of, err := m.Info()
	if !ok || err != nil {
		return false
	}
	id, _ := of.ID()
	return slices.Contains(used, id)
}

// LoadGroupProgram loads the program with a group's constants.
func LoadGroupProgram(pins *kernel.Opened, v GroupValue) (*ebpf.Program, error) {
	spec, err := bpf.LoadReuse()
	if err != nil {
		return nil, err
	}
	constant := struct {
		Service      uint32
		Endpoint     [2]uint32
		SocketHolder uint32
		Count        uint32
	}{v.Service, v.Endpoint, v.SocketHolder, v.Endpoints}
	if err := spec.Variables[bpf.ReuseVarSteerGroup].Set(constant); err != nil {
		return nil, err
	}
	share := map[string]*ebpf.Map{}
	for name, m := range pins.Maps {
		if _, ok := spec.Maps["steer_"+name]; ok {
			share["steer_"+name] = m
		}
	}
	var first error
	// Linux before 5.14 has no queue migration and rejects steer_migrate. steer_reuse is the fallback.
	for _, name := range []string{bpf.ReuseProgSteerMigrate, bpf.ReuseProgSteerReuse} {
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

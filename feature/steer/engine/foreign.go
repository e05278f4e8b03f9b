// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// The owner of a socket can attach a program to its reuseport group and replace weir's. Collectors with their own
// balancer do so at start. No system call returns the attached program, so an iterator over sockets finds it.

// GroupPrograms requires iterators over sockets.
var GroupPrograms = kernel.Need{Name: "iterators over sockets, with BTF", Since: "5.9", Optional: true,
	For:    "engine sk_reuseport: detecting a foreign program in a reuseport group",
	Remedy: "build the kernel with CONFIG_DEBUG_INFO_BTF",
	Probe: func() error {
		_, err := ProgramsOfGroups()
		return err
	}}

// groupIterators loads the iterators once, because weir serve uses them at every admission.
var groupIterators = sync.OnceValues(func() (*kernel.Collection, error) {
	spec, err := bpf.LoadGroups()
	if err != nil {
		return nil, err
	}
	return kernel.Load(spec, []string{bpf.GroupsProgSteerUdpGroups, bpf.GroupsProgSteerTcpGroups}, nil)
})

// ProgramsOfGroups returns the program of each socket's group, by socket cookie, in the calling thread's network
// namespace.
func ProgramsOfGroups() (map[uint64]ebpf.ProgramID, error) {
	c, err := groupIterators()
	if err != nil {
		return nil, err
	}
	out := map[uint64]ebpf.ProgramID{}
	for _, prog := range c.Programs {
		b, err := kernel.Iterate(prog)
		if err != nil {
			return nil, err
		}
		for size := int(unsafe.Sizeof(bpf.GroupsMember{})); len(b) >= size; b = b[size:] {
			out[binary.NativeEndian.Uint64(b)] = ebpf.ProgramID(binary.NativeEndian.Uint32(b[8:]))
		}
	}
	return out, nil
}

// groupList returns the result of ProgramsOfGroups, read at the first call. It is empty if the kernel lacks the
// iterators.
type groupList func() (map[uint64]ebpf.ProgramID, error)

// ListGroups returns a list shared by all sockets of a member, because each reading iterates over all TCP sockets.
func ListGroups(ns *netns.Handle) groupList {
	return sync.OnceValues(func() (programs map[uint64]ebpf.ProgramID, err error) {
		err = ns.Do(func() error { programs, err = ProgramsOfGroups(); return err })
		if errors.Is(err, bounded.ErrStuck) || err != nil && GroupPrograms.Check() != nil {
			return nil, nil
		}
		return programs, err
	})
}

// refuseForeign rejects a group with a foreign program, unless the configuration allows weir to replace it. Without
// iterators it detects none.
func (e *Engine) refuseForeign(p *record.Service, key GroupKey, s service.Adopted, programs groupList) error {
	if p.Service.Foreign == spec.ForeignReplace {
		return nil
	}
	all, err := programs()
	if err != nil {
		return err
	}
	id := all[s.Socket.Cookie]
	if id == 0 {
		return nil
	}
	prog, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil //nolint:nilerr // it went meanwhile
	}
	defer prog.Close()
	if e.oursNow(prog) {
		return nil
	}
	name := ""
	if info, err := prog.Info(); err == nil {
		name = " " + info.Name
	}
	return fmt.Errorf("%w: program %d%s chooses among the sockets of %s, joined by process %d: turn off the daemon's own balancer, or set foreign: replace", errForeign, id, name, key, s.PID)
}

// Hijacked describes the groups with a program other than weir's.
func Hijacked(groups map[GroupKey]GroupValue, holders *ebpf.Map) []string {
	programs, err := ProgramsOfGroups()
	if err != nil {
		return nil // doctor lists the missing need
	}
	var out []string
	for k, v := range groups {
		var cookie uint64
		if k.Proto == 0 || holders.Lookup(v.SocketHolder, &cookie) != nil {
			continue
		}
		if id := programs[cookie]; id != ebpf.ProgramID(v.Program) {
			out = append(out, fmt.Sprintf("program %d chooses among the sockets of %s, not weir's program %d", id, k, v.Program))
		}
	}
	return out
}

// Narrower describes sockets bound to one address of a wildcard group. They form their own groups, and the kernel
// prefers these.
func Narrower(groups map[GroupKey]GroupValue) []string {
	var out []string
	for k := range groups {
		if k.Proto == 0 || !k.Address().IsUnspecified() {
			continue
		}
		socks, err := Bound(k.Proto, k.Port)
		if err != nil {
			continue
		}
		for _, s := range socks {
			o := keyOfSocket(s)
			if _, ours := groups[o]; !ours && overlap(o, k) && !o.Address().IsUnspecified() {
				out = append(out, fmt.Sprintf("a socket of user %d at %s is bound more specifically than %s: traffic to its address bypasses weir", s.UID, o, k))
			}
		}
	}
	return out
}

// Bound lists the sockets that receive new traffic of a port. Port 0 means all ports.
func Bound(proto uint8, port uint16) ([]sockdiag.Socket, error) {
	states := uint32(1 << unix.BPF_TCP_LISTEN)
	if proto == unix.IPPROTO_UDP {
		states = 1 << unix.BPF_TCP_CLOSE
	}
	return sockdiag.Dump(sockdiag.Query{Proto: proto, LocalPort: port, States: states})
}

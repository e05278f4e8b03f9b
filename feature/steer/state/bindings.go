// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// addShared adds the counters of the share_port hook.
func (s *Service) addShared(r *kernel.Root) {
	if !s.Record.Service.SharePort {
		return
	}
	if c, err := engine.ReadShared(s.Record, r); errors.Is(err, kernel.ErrABI) {
		s.Problem = "the hook of share_port is unreadable: " + err.Error()
	} else if err != nil {
		s.Problem = engine.ProblemBind
	} else {
		s.Shared = &c
	}
	s.addSharedAt(r)
}

// addSharedAt reads the positions of the share_port programs among the programs of their hooks. It needs permission.
func (s *Service) addSharedAt(r *kernel.Root) {
	root, err := units.CgroupRoot()
	if err != nil {
		return
	}
	o, err := r.Open(engine.BindInstance, "ports")
	if err != nil {
		return
	}
	defer o.Close()
	for _, at := range []struct {
		pin  string
		hook ebpf.AttachType
	}{{bpf.BindProgBindShare4, ebpf.AttachCGroupInet4Bind}, {bpf.BindProgBindShare6, ebpf.AttachCGroupInet6Bind}} {
		ln, err := o.Link(at.pin)
		if err != nil {
			continue
		}
		if p, ok, err := kernel.PositionAt(kernel.Cgroup{Path: root, Hook: at.hook}, ln); err == nil && ok {
			s.SharedAt = append(s.SharedAt, p)
		}
		ln.Close()
	}
}

// Bindings summarizes the bindings of one network namespace.
type Bindings struct {
	Netns    string `json:"netns"` // kernel name: net:[4026531840]
	Inode    uint64 `json:"netns_inode"`
	Bindings int    `json:"bindings"`
	Room     int    `json:"room"` // capacity; it grows when it is full
	Scope    string `json:"-"`    // pin directory

	Unserved []Unserved `json:"unserved,omitempty"` // see NoteUnserved
}

// readDispatch reads the bindings of all namespaces.
func readDispatch(r *kernel.Root, all []kernel.Instance) (out []Bindings, err error) {
	for _, i := range all {
		if i != record.EngineInstance(i.Scope, spec.EngineSkLookup) {
			continue
		}
		inode, err := record.ScopeInode(i.Scope)
		if err != nil {
			return nil, err
		}
		pins, err := r.Open(i, "bound_sets", "bound_many")
		if errors.Is(err, kernel.ErrUnreadable) {
			return nil, err
		} else if err != nil {
			continue // no bindings, or unreadable: ReadOutdated reports it
		}
		if pins.Meta.RequireABI(i, record.ABI) != nil {
			pins.Close()
			continue
		}
		n, err := table.CountBindings(pins.Maps["bound_sets"])
		room := engine.Room(pins.Maps)
		pins.Close()
		if err != nil {
			return nil, err
		}
		out = append(out, Bindings{Netns: fmt.Sprintf("net:[%s]", i.Scope), Inode: inode, Bindings: n, Room: room, Scope: i.Scope})
	}
	return out, nil
}

// Sharing counts the sockets with the address, family and owner of s.
func Sharing(socks []sockdiag.Socket, s sockdiag.Socket) (n int) {
	for _, o := range socks {
		if o.Local == s.Local && o.Family == s.Family && o.UID == s.UID {
			n++
		}
	}
	return n
}

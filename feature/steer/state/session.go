// SPDX-License-Identifier: Apache-2.0

package state

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Session is an established TCP connection of a service and its assigned slot. A change of a device's slot moves its
// datagrams at once. Its sessions stay, so the device is split until they are reset and reconnect.
type Session struct {
	Remote netip.AddrPort `json:"remote"`
	Local  netip.AddrPort `json:"local"`
	Device string         `json:"device,omitempty"` // name, by: device
	From   *int           `json:"from"`             // slot of the member with the socket; null: the process is not a member
	Slot   int            `json:"slot"`             // current slot of the device

	Socket sockdiag.Socket `json:"-"`
}

// Cookie returns the cookie of the session's socket (SO_COOKIE).
func (s Session) Cookie() uint64 { return s.Socket.Cookie }

// Router returns the name and address of the session's device.
func (s Session) Router() string {
	if s.Device != "" {
		return s.Device + " (" + s.Remote.Addr().Unmap().String() + ")"
	}
	return s.Remote.Addr().Unmap().String()
}

// Slots formats the current and the assigned slot: "slot 1 → 0".
func (s Session) Slots() string {
	if s.From == nil {
		return fmt.Sprintf("no member → slot %d", s.Slot)
	}
	return fmt.Sprintf("slot %d → %d", *s.From, s.Slot)
}

// Misplaced lists the sessions of members other than their device's slot, including previous members, in order of
// address. It needs root. The list is empty if the service is bypassed or its policy does not keep devices in one slot.
func (s *Service) Misplaced(ctx context.Context) ([]Session, error) {
	out, _, err := s.Sessions(ctx, nil)
	return out, err
}

// Sessions lists the misplaced sessions, and the cookies of sessions not accepted yet. No process has the latter, so
// their slot is unknown. of selects sockets; nil selects all.
func (s *Service) Sessions(ctx context.Context, of map[uint64]bool) (misplaced []Session, waiting []uint64, err error) {
	if s.Bypassed || !s.By.KeepsDevices() || len(s.Table) == 0 {
		return nil, nil, nil
	}
	socks, err := s.Established()
	if err != nil || len(socks) == 0 {
		return nil, nil, err
	}
	m, err := s.Mapping(WhatIf{})
	if err != nil {
		return nil, nil, err
	}
	holders, err := s.holders(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, sk := range socks {
		if of != nil && !of[sk.Cookie] {
			continue
		}
		if sk.Inode == 0 { // in a listener's queue
			waiting = append(waiting, sk.Cookie)
			continue
		}
		if found, ok := m.misplaced(sk, holders[sk.Inode]); ok {
			misplaced = append(misplaced, found)
		}
	}
	slices.SortFunc(misplaced, func(a, b Session) int { return a.Remote.Compare(b.Remote) })
	return misplaced, waiting, nil
}

// misplaced evaluates one session. held are the slots of the members with its socket.
func (m *Mapping) misplaced(sk sockdiag.Socket, held []int) (Session, bool) {
	p := m.Assign(sk.Remote.Addr().Unmap())
	belongs := p.Slot
	if p.Instead != nil {
		belongs = *p.Instead
	}
	out := Session{Remote: sk.Remote, Local: sk.Local, Device: p.Device, Slot: belongs, Socket: sk}
	switch {
	case slices.Contains(held, belongs):
		return out, false
	case !m.whole[belongs] && (m.onEmpty == spec.Pass || len(held) == 0):
		return out, false // any member is right, or none is known
	}
	if len(held) > 0 {
		out.From = &held[0]
	}
	return out, true
}

// Established lists the service's sessions, including those during the handshake.
func (s *Service) Established() ([]sockdiag.Socket, error) {
	ns, err := s.OpenNetns()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	bound, err := s.openBound()
	if err != nil {
		return nil, err
	}
	defer bound.Close()
	ports := map[uint16]bool{}
	for _, ep := range s.Endpoints {
		if ep.Proto == unix.IPPROTO_TCP {
			ports[ep.Port] = true
		}
	}
	if bound.named {
		ports = map[uint16]bool{0: true} // bindings may lead here from any port
	}
	var out []sockdiag.Socket
	err = ns.Do(func() error {
		for port := range ports {
			socks, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_TCP, LocalPort: port,
				States: 1<<sockdiag.Established | 1<<sockdiag.SynRecv | 1<<sockdiag.NewSynRecv})
			if err != nil {
				return err
			}
			for _, sk := range socks {
				to := netip.AddrPortFrom(sk.Local.Addr().Unmap(), sk.Local.Port())
				if mine, decides := bound.decides(s, to); mine || !decides && s.owns(unix.IPPROTO_TCP, to) {
					out = append(out, sk)
				}
			}
		}
		return nil
	})
	return out, err
}

// boundTo is the bindings of a service's namespace, and the service's number there.
type boundTo struct {
	*bindings.View // nil: no bindings
	id             uint32
	named          bool // the service may have bindings
}

func (s *Service) openBound() (b boundTo, err error) {
	b.View, err = bindings.OpenView(s.Root, s.PinScope)
	if errors.Is(err, kernel.ErrNotExist) {
		return boundTo{}, nil
	} else if err != nil {
		return b, err
	}
	var x engine.Label
	x, b.named, err = b.Labels.Get(s.Name)
	b.id = x.ID
	if err != nil {
		b.Close()
	}
	return b, err
}

// Close closes the maps, if any.
func (b boundTo) Close() {
	if b.View != nil {
		b.View.Close()
	}
}

// decides reports whether a binding decides for a TCP destination, and whether it leads to the service. It follows
// steer_dispatch.
func (b boundTo) decides(s *Service, to netip.AddrPort) (mine, decides bool) {
	if b.View == nil {
		return false, false
	}
	x, ok := b.Bound.Lookup(to.Addr(), unix.IPPROTO_TCP, to.Port())
	if !ok {
		return false, false
	}
	for _, eps := range append(s.Others[:len(s.Others):len(s.Others)], s.Endpoints) {
		if BestEndpoint(eps, unix.IPPROTO_TCP, to) >= x.Prefix.Bits() {
			return false, false
		}
	}
	return b.named && x.Value-1 == b.id, true
}

// owns reports whether a destination belongs to the service: no other service of the namespace has a longer prefix for
// it.
func (s *Service) owns(proto uint8, to netip.AddrPort) bool {
	best := BestEndpoint(s.Endpoints, proto, to)
	if best < 0 {
		return false
	}
	for _, o := range s.Others {
		if BestEndpoint(o, proto, to) > best {
			return false
		}
	}
	return true
}

// BestEndpoint returns the length of the longest matching prefix, or -1.
func BestEndpoint(eps []service.Endpoint, proto uint8, to netip.AddrPort) int {
	best := -1
	for _, ep := range eps {
		if ep.Proto == proto && ep.Port == to.Port() && ep.Prefix.Contains(to.Addr()) {
			best = max(best, ep.Prefix.Bits())
		}
	}
	return best
}

// holders returns the slots of each socket, by inode: a member's processes or their descendants have it open.
func (s *Service) holders(ctx context.Context) (map[uint32][]int, error) {
	tree, err := service.ReadTree()
	if err != nil {
		return nil, err
	}
	out := map[uint32][]int{}
	for _, slot := range s.Slots {
		var pids []int
		if slot.PID != 0 && !slot.Exited {
			pids = append(pids, slot.PID)
		}
		if slot.Drains != 0 { // sessions stay with the generation they began with
			pids = append(pids, slot.Drains)
		}
		if m := s.Record.Service.Member(slot.Slot); m != nil {
			// A process admitted by an operator may differ from the configured one.
			if more, err := m.Processes(ctx); err == nil && (len(pids) == 0 || slices.Contains(more, pids[0])) {
				pids = append(pids, more...)
			}
		}
		inodes, err := service.ListSockets(tree.Descendants(pids))
		if err != nil {
			return nil, err
		}
		for _, inode := range inodes {
			if !slices.Contains(out[inode], slot.Slot) {
				out[inode] = append(out[inode], slot.Slot)
			}
		}
	}
	return out, nil
}

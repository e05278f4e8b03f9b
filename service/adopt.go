// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/internal/users"
	"golang.org/x/sys/unix"
)

// Reasons why a member cannot be adopted now. The error text has the details.
var (
	ErrNotRunning = errors.New("not running")
	ErrNoSocket   = errors.New("socket missing")
	ErrAmbiguous  = errors.New("more than one socket fits")
	ErrMPTCP      = errors.New("listens with MPTCP")
	ErrElsewhere  = errors.New("runs in another network namespace")
	ErrNotReady   = errors.New("not ready")
)

// Adopted is one socket of a member, as a duplicate of the member's descriptor.
type Adopted struct {
	Endpoint Endpoint
	FD       int
	PID      int
	Socket   sockdiag.Socket
}

// Adoption holds every socket required by a slot. Close it soon: a socket stays open while a duplicate is open.
type Adoption struct {
	Sockets []Adopted // one for each endpoint, in order
	procs   []*pidfd.Process
}

// Close closes the duplicates.
func (a *Adoption) Close() {
	seen := map[int]bool{} // a dual-stack socket serves two endpoints
	for i, s := range a.Sockets {
		a.Sockets[i].FD = -1 // a second Close must not close a reused descriptor number
		if s.FD >= 0 && !seen[s.FD] {
			seen[s.FD] = true
			pidfd.CloseDup(s.FD)
		}
	}
	for _, p := range a.procs {
		p.Close()
	}
}

// Alive reports whether every process of the member still runs.
func (a *Adoption) Alive() bool {
	for _, p := range a.procs {
		if !p.Alive() {
			return false
		}
	}
	return true
}

// PIDs returns the processes with the sockets, each once. The process of the first socket comes first.
func (a *Adoption) PIDs() []int {
	var out []int
	for _, s := range a.Sockets {
		if !slices.Contains(out, s.PID) {
			out = append(out, s.PID)
		}
	}
	return out
}

// Processes returns the processes that may hold a member's sockets, the likeliest first.
func (m Member) Processes(ctx context.Context) ([]int, error) {
	switch {
	case m.PID != 0:
		return []int{m.PID}, nil
	case m.PIDFile != "":
		pid, err := units.ReadPIDFile(m.PIDFile)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNotRunning, err)
		}
		return []int{pid}, nil
	case m.Unit != "":
		return m.unitProcesses(ctx)
	case m.User != "":
		if _, err := users.Find(m.User); err != nil {
			return nil, fmt.Errorf("%w: /etc/passwd has no user %s: add it, or name its number", ErrNotRunning, m.User)
		}
		return nil, fmt.Errorf("%w: no process of user %s has registered itself", ErrNotRunning, m.User)
	}
	pids, err := units.CgroupProcs(m.Cgroup)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotRunning, err)
	}
	if len(pids) == 0 {
		return nil, fmt.Errorf("%w: cgroup %s has no process", ErrNotRunning, m.Cgroup)
	}
	return pids, nil
}

func (m Member) unitProcesses(ctx context.Context) ([]int, error) {
	u, err := units.UnitMain(ctx, m.Unit)
	if err != nil {
		return nil, err
	}
	if u.MainPID == 0 {
		return nil, fmt.Errorf("%w: unit %s is %s", ErrNotRunning, m.Unit, u.ActiveState)
	}
	pids := []int{int(u.MainPID)}
	if u.ControlGroup != "" {
		// Workers and wrappers: another process than the main one may hold the sockets.
		more, _ := units.CgroupProcs(u.ControlGroup)
		for _, p := range more {
			if p != pids[0] {
				pids = append(pids, p)
			}
		}
	}
	return pids, nil
}

// Adopt finds a member's sockets for the endpoints in namespace ns and duplicates them. Errors name the missing socket
// and the remedy.
func (m Member) Adopt(ctx context.Context, ns *netns.Handle, spec Spec) (*Adoption, error) {
	if err := m.validate(spec.Listen); err != nil {
		return nil, err // for a member without a configuration
	}
	pids, err := m.Processes(ctx)
	if err != nil {
		return nil, err
	}
	eps := spec.Endpoints()
	at := BoundTo(eps, m.Bound)
	socks, err := socketsFor(ns, at)
	if err != nil {
		return nil, err
	}
	for i := range socks {
		socks[i] = slices.DeleteFunc(socks[i], func(s sockdiag.Socket) bool { return m.Not[s.Cookie] })
	}
	a := &Adoption{}
	owners, err := a.open(pids, socks)
	if err == nil {
		err = m.pick(a, ns, slotSockets{eps, at, socks}, owners)
	}
	if err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// haveSockets reports whether any process has a socket of any kind.
func haveSockets(all []owner) bool {
	return slices.ContainsFunc(all, func(h owner) bool { return len(h.fds) > 0 })
}

// lister lists sockets and caches the answers: both families of a listen need the same list.
type lister map[sockdiag.Query][]sockdiag.Socket

// dumpSockets is a variable for tests.
var dumpSockets = sockdiag.Dump

func (l lister) dump(q sockdiag.Query) ([]sockdiag.Socket, error) {
	if socks, ok := l[q]; ok {
		return socks, nil
	}
	socks, err := dumpSockets(q)
	if err == nil {
		l[q] = socks
	}
	return socks, err
}

// owner is a living process of the member, with its socket descriptors by inode. proc is closed if no socket fits.
type owner struct {
	proc *pidfd.Process
	fds  map[uint32][]int
}

// maxOwners bounds the processes with a fitting socket in one adoption. Each uses a descriptor.
const maxOwners = 256

// open reads the descriptors of processes. The adoption keeps the first process, and the processes with a fitting
// socket: a cgroup may have more processes than this process may have descriptors.
func (a *Adoption) open(pids []int, socks [][]sockdiag.Socket) ([]owner, error) {
	fitting := map[uint32]bool{}
	for _, s := range slices.Concat(socks...) {
		fitting[s.Inode] = true
	}
	var out []owner
	var last error
	for _, pid := range pids {
		p, err := pidfd.Open(pid)
		if err != nil {
			last = err
			continue
		}
		fds, err := p.Sockets()
		if err != nil {
			p.Close()
			last = err
			continue
		}
		alive, fits := p.Alive(), hasAny(fds, fitting)
		if len(a.procs) == 0 || fits && len(a.procs) < maxOwners {
			a.procs = append(a.procs, p)
		} else if p.Close(); fits {
			continue // the limit is reached
		}
		if alive {
			out = append(out, owner{p, fds})
		}
	}
	if len(out) == 0 {
		if last == nil || errors.Is(last, pidfd.ErrGone) {
			return nil, fmt.Errorf("%w: process %d has exited", ErrNotRunning, pids[0])
		}
		return nil, last
	}
	return out, nil
}

func hasAny(fds map[uint32][]int, fitting map[uint32]bool) bool {
	for inode := range fds {
		if fitting[inode] {
			return true
		}
	}
	return false
}

// slotSockets are the endpoints of a slot, the member's bound address for each, and the namespace's sockets bound there,
// best first.
type slotSockets struct {
	eps, at []Endpoint
	socks   [][]sockdiag.Socket
}

// BoundTo returns the bound address for each endpoint. bound has one for each listen, or none if they do not differ.
func BoundTo(eps []Endpoint, bound []Listen) []Endpoint {
	if len(bound) == 0 {
		return eps
	}
	out := slices.Clone(eps)
	for i, e := range eps {
		b := bound[e.Listen]
		out[i].Port, out[i].Proto = b.Port, b.Proto
		if b.V4 && e.Family == unix.AF_INET || b.V6 && e.Family == unix.AF_INET6 {
			out[i].Prefix = b.endpoint(e.Listen, e.Family).Prefix
		}
	}
	return out
}

// socketsFor lists the sockets of ns usable for each endpoint, best first.
func socketsFor(ns *netns.Handle, eps []Endpoint) ([][]sockdiag.Socket, error) {
	out := make([][]sockdiag.Socket, len(eps))
	known := lister{}
	err := ns.Do(func() error {
		for i, e := range eps {
			// TCP: listeners. UDP: the kernel calls the state of an unconnected socket "closed".
			q := sockdiag.Query{Proto: e.Proto, LocalPort: e.Port, States: 1 << unix.BPF_TCP_LISTEN}
			if e.Proto == unix.IPPROTO_UDP {
				q.States = 1 << unix.BPF_TCP_CLOSE
			}
			socks, err := known.dump(q)
			if err != nil {
				return err
			}
			out[i] = ranked(e, socks)
		}
		return nil
	})
	return out, err
}

// ranked returns the sockets that fit an endpoint, best first.
func ranked(e Endpoint, socks []sockdiag.Socket) []sockdiag.Socket {
	out := slices.DeleteFunc(slices.Clone(socks), func(s sockdiag.Socket) bool { return fit(e, s) == 0 })
	slices.SortStableFunc(out, func(a, b sockdiag.Socket) int { return fit(e, b) - fit(e, a) })
	return out
}

// fit rates a socket for an endpoint. 0 means it does not fit. The endpoint's own family is better than dual stack, and
// its own address is better than a wildcard.
func fit(e Endpoint, s sockdiag.Socket) int {
	if s.Proto != e.Proto || s.Local.Port() != e.Port {
		return 0
	}
	score := 2
	if s.Family != e.Family {
		if e.Family != unix.AF_INET || s.V6Only {
			return 0
		}
		score = 1 // a dual-stack socket accepts IPv4 too
	}
	addr := s.Local.Addr().Unmap()
	switch {
	case addr.IsUnspecified():
		if e.Prefix.Bits() == 0 {
			score += 4
		}
	case addr.Is4() != (e.Family == unix.AF_INET):
		return 0
	case e.Prefix.Contains(addr):
		score += 2
	default:
		return 0
	}
	return score
}

// pick selects the member's socket for every endpoint. It prefers one process with all of them.
func (m Member) pick(a *Adoption, ns *netns.Handle, p slotSockets, owners []owner) error {
	tries := make([][]owner, 0, len(owners)+1)
	for _, h := range owners {
		tries = append(tries, []owner{h})
	}
	if len(owners) > 1 {
		tries = append(tries, owners) // UDP in one process, TCP in another
	}
	var lastErr error
	for _, hs := range tries {
		chosen, err := choose(p, hs, m.Group)
		if err == nil {
			return a.dup(ns, chosen, len(m.Bound) > 0)
		}
		lastErr = err
	}
	return m.explain(ns, p, owners, lastErr)
}

type choice struct {
	endpoint Endpoint
	at       Endpoint // bound address of its socket
	socket   sockdiag.Socket
	owner    owner
}

// choose selects one socket for every endpoint. With group, any of several equally bound sockets may be selected.
func choose(p slotSockets, owners []owner, group bool) ([]choice, error) {
	var out []choice
	var none missing
	for i, at := range p.at {
		var fits []choice
		for _, s := range p.socks[i] {
			for _, h := range owners {
				if len(h.fds[s.Inode]) > 0 {
					fits = append(fits, choice{p.eps[i], at, s, h})
					break
				}
			}
		}
		if len(fits) == 0 {
			none = append(none, at)
			continue
		}
		if len(fits) > 1 && fit(at, fits[0].socket) == fit(at, fits[1].socket) &&
			!(group && alike(fits[0].socket, fits[1].socket)) {
			return nil, fmt.Errorf("%w: %s: the member has %d sockets there; a slot takes one: let the daemon open one, or run one daemon a slot", ErrAmbiguous, at, len(fits))
		}
		out = append(out, fits[0])
	}
	if len(none) > 0 {
		return nil, none
	}
	return out, nil
}

// alike reports whether two sockets of a process are bound to the same address and interface.
func alike(a, b sockdiag.Socket) bool {
	return a.Local == b.Local && a.Family == b.Family && a.Interface == b.Interface
}

func (a *Adoption) dup(ns *netns.Handle, chosen []choice, bound bool) error {
	open := map[uint32]int{}
	for _, c := range chosen {
		fd, ok := open[c.socket.Inode]
		if !ok {
			var err error
			if fd, err = c.owner.proc.Dup(c.owner.fds[c.socket.Inode][0]); err != nil {
				return err
			}
			open[c.socket.Inode] = fd
		}
		a.Sockets = append(a.Sockets, Adopted{Endpoint: c.endpoint, FD: fd, PID: c.owner.proc.PID(), Socket: c.socket})
		// Kernels list an MPTCP listener's first subflow as a TCP listener with the same inode.
		if proto, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err == nil && proto == unix.IPPROTO_MPTCP {
			return mptcpError(c.socket.Local)
		}
		// The descriptor number may have been reused meanwhile.
		if cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE); err != nil || cookie != c.socket.Cookie {
			return fmt.Errorf("%w: %s was replaced during adoption", ErrNoSocket, c.endpoint)
		}
		if err := ns.Do(func() error { return narrower(c.at, c.socket, fd, bound) }); err != nil {
			return fmt.Errorf("process %d, socket for %s: %w", c.owner.proc.PID(), c.endpoint, err)
		}
	}
	return nil
}

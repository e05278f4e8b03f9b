// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
)

// missing lists the endpoints without a socket of the member.
type missing []Endpoint

func (m missing) Error() string {
	names := make([]string, len(m))
	for i, e := range m {
		names[i] = e.String()
	}
	return fmt.Sprintf("%v: %s", ErrNoSocket, strings.Join(names, ", "))
}

func (missing) Unwrap() error { return ErrNoSocket }

// explain finds the reason why no socket fits, and adds a remedy for common reasons.
func (m Member) explain(ns *netns.Handle, p slotSockets, owners []owner, err error) error {
	none, ok := errors.AsType[missing](err)
	if !ok {
		return err
	}
	pid := owners[0].proc.PID()
	if other, oerr := netns.OfPID(pid); oerr == nil {
		defer other.Close()
		if !other.Same(ns) {
			return fmt.Errorf("%w: process %d is in %s, the service in %s: set netns: pid:%d, or its name", ErrElsewhere, pid, other, ns, pid)
		}
	}
	if at, ok := mptcpAt(ns, owners, none); ok {
		return mptcpError(at)
	}
	if near := nearly(ns, owners, none); near != nil {
		return near
	}
	if child := childWith(owners, p.fitting(none)); child != 0 {
		return fmt.Errorf("process %d: %w: its child process %d has the socket: name their unit or cgroup, or the child", pid, err, child)
	}
	return fmt.Errorf("process %d: %w", pid, err)
}

// fitting returns the inode numbers of usable sockets for the missing endpoints.
func (p slotSockets) fitting(none missing) map[uint32]bool {
	out := map[uint32]bool{}
	for i, at := range p.at {
		if slices.Contains(none, at) {
			for _, s := range p.socks[i] {
				out[s.Inode] = true
			}
		}
	}
	return out
}

// maxChildren bounds the processes examined for an explanation.
const maxChildren = 64

// childWith returns a descendant of a member's process with a fitting socket, such as a master's worker; 0 if there is
// none.
func childWith(owners []owner, fitting map[uint32]bool) int {
	if len(fitting) == 0 {
		return 0
	}
	var all []int
	for _, o := range owners[:min(len(owners), maxChildren)] {
		all = append(all, children(o.proc.PID())...)
	}
	for i := 0; i < len(all) && i < maxChildren; i++ {
		all = append(all, children(all[i])...)
		p, err := pidfd.Open(all[i])
		if err != nil {
			continue
		}
		fds, err := p.Sockets()
		p.Close()
		if err == nil && hasAny(fds, fitting) {
			return all[i]
		}
	}
	return 0
}

func mptcpError(at netip.AddrPort) error {
	return fmt.Errorf("%w at %s, and socket maps do not support it: for a Go program set GODEBUG=multipathtcp=0, for others leave out IPPROTO_MPTCP, or sysctl net.mptcp.enabled=0 in its namespace and restart it", ErrMPTCP, at)
}

// mptcpAt finds an MPTCP listener of the owners for a missing TCP endpoint.
func mptcpAt(ns *netns.Handle, owners []owner, none missing) (at netip.AddrPort, found bool) {
	if !slices.ContainsFunc(none, func(e Endpoint) bool { return e.Proto == unix.IPPROTO_TCP }) {
		return at, false // listing makes the kernel walk its table of all MPTCP connections
	}
	var socks []sockdiag.Socket
	if ns.Do(func() (err error) { socks, err = sockdiag.MPTCPListeners(0); return err }) != nil {
		return at, false
	}
	for _, s := range socks {
		held := slices.ContainsFunc(owners, func(h owner) bool { return len(h.fds[s.Inode]) > 0 })
		if held && slices.ContainsFunc(none, func(e Endpoint) bool { return fit(e, s) > 0 }) {
			return s.Local, true
		}
	}
	return at, false
}

// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"net"
	"unsafe"

	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"golang.org/x/sys/unix"
)

// ErrNarrow is returned for a socket that accepts less than the slot's traffic. A program's choice of a socket overrides
// the kernel's checks. Datagrams would reach a socket bound elsewhere, answers would have a wrong source address, and
// the socket's own filter would drop packets silently.
var ErrNarrow = errors.New("accepts less than the slot's traffic")

// Narrow returns an error wrapping ErrNarrow if the socket of fd is bound to an interface or a VRF, or has a filter.
func Narrow(fd int) error {
	if index, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX); err == nil && index != 0 {
		return boundTo(index)
	} else if err != nil { // before Linux 5.0
		if name, err := unix.GetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE); err == nil && name != "" {
			return boundToName(name)
		}
	}
	if has, err := hasFilter(fd); err != nil {
		return err
	} else if has {
		return fmt.Errorf("%w: it has a filter of its own (SO_ATTACH_FILTER or SO_ATTACH_BPF), and packets dropped by it would be lost: remove the filter", ErrNarrow)
	}
	return nil
}

func boundTo(index int) error {
	name := fmt.Sprintf("interface %d", index)
	if i, err := net.InterfaceByIndex(index); err == nil {
		name = i.Name
	}
	return boundToName(name)
}

func boundToName(name string) error {
	return fmt.Errorf("%w: it is bound to %s (SO_BINDTODEVICE, ip vrf exec), and weir would give it packets from other interfaces: do not bind it to an interface, or use a network namespace of its own", ErrNarrow, name)
}

// hasFilter queries the length of a socket's classic filter. For an eBPF filter the kernel returns EACCES (sk_get_filter
// in net/core/filter.c). The query takes the socket's lock, which its owner may hold.
func hasFilter(fd int) (bool, error) {
	return bounded.Do(bounded.Socket(fd), func() (bool, error) {
		length := uint32(0)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_GET_FILTER, 0, uintptr(unsafe.Pointer(&length)), 0)
		return errno == 0 && length > 0 || errno == unix.EACCES, nil
	}, nil)
}

// narrower returns why a fitting socket cannot serve the whole endpoint. bound means that the configuration names the
// socket's address, so a narrow address is intended.
func narrower(e Endpoint, s sockdiag.Socket, fd int, bound bool) error {
	if err := Narrow(fd); err != nil {
		return err
	}
	addr := s.Local.Addr().Unmap()
	if !bound && !addr.IsUnspecified() && !e.Prefix.IsSingleIP() {
		return fmt.Errorf("%w: it is bound to %s only, and the service covers %s: bind it to the wildcard address, listen to %s only, or set bound: [%s] to give it all traffic",
			ErrNarrow, addr, e, addr, exact(e, s))
	}
	return nil
}

// exact returns the listen of a socket's own address.
func exact(e Endpoint, s sockdiag.Socket) string {
	return fmt.Sprintf("%s %s", protoName(e), s.Local)
}

// nearly finds an owner's socket that almost fits a missing endpoint, and describes the difference.
func nearly(ns *netns.Handle, owners []owner, none missing) error {
	if !haveSockets(owners) {
		return nil
	}
	at := make([][]sockdiag.Socket, len(none))
	known := lister{}
	err := ns.Do(func() (err error) {
		for i, e := range none {
			q := sockdiag.Query{Proto: e.Proto, LocalPort: e.Port, States: 1<<sockdiag.Established | 1<<sockdiag.Close}
			if e.Proto == unix.IPPROTO_TCP {
				q.States = 1<<sockdiag.Listen | 1<<sockdiag.Close | 1<<sockdiag.BoundInactive
			}
			if at[i], err = known.dump(q); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil //nolint:nilerr // the plain reason is told
	}
	for i, e := range none {
		for _, s := range at[i] {
			for _, h := range owners {
				if len(h.fds[s.Inode]) == 0 {
					continue
				}
				if text := lacking(e, s); text != "" {
					return fmt.Errorf("process %d: %w: %s", h.proc.PID(), none, text)
				}
			}
		}
	}
	return nil
}

// lacking describes why a socket at an endpoint's port cannot serve it.
func lacking(e Endpoint, s sockdiag.Socket) string {
	switch {
	case e.Proto == unix.IPPROTO_UDP && s.State == sockdiag.Established:
		return fmt.Sprintf("its socket at %s is connected to %s, and accepts nothing from other sources: leave it unconnected", s.Local, s.Remote)
	case e.Proto == unix.IPPROTO_TCP && s.State != sockdiag.Listen:
		return fmt.Sprintf("its socket at %s is bound, but does not listen yet", s.Local)
	case e.Family == unix.AF_INET && s.Family == unix.AF_INET6 && s.V6Only:
		return fmt.Sprintf("its socket at %s accepts IPv6 only (IPV6_V6ONLY, net.ipv6.bindv6only): open one for IPv4, or listen to %s6 only", s.Local, protoName(e))
	case e.Family == unix.AF_INET6 && s.Family == unix.AF_INET:
		return fmt.Sprintf("its socket at %s accepts IPv4 only: open one for IPv6, or listen to %s4 only", s.Local, protoName(e))
	case !s.Local.Addr().IsUnspecified():
		return fmt.Sprintf("its socket is bound to %s", s.Local.Addr().Unmap())
	}
	return ""
}

func protoName(e Endpoint) string {
	if e.Proto == unix.IPPROTO_UDP {
		return "udp"
	}
	return "tcp"
}

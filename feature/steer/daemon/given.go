// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// given is the sockets opened by weir for a daemon, like systemd's socket activation (sd_listen_fds(3)): descriptors
// from 3, in the order of the service's listens.
type given struct {
	files []*os.File
	names []string
}

// openGiven opens one socket for each listen in namespace ns, owned by user uid. The kernel lets sockets share a port
// only if they have the same owner. A listen of both families is one dual-stack socket.
func openGiven(ns *netns.Handle, listens []service.Listen, backlog, uid int) (*given, error) {
	g := &given{}
	err := ns.Do(func() error {
		for _, l := range listens {
			fd, err := openAs(uid, l, backlog)
			if err != nil {
				return fmt.Errorf("open socket for %s: %w%s", l, err, portAdvice(err))
			}
			g.files = append(g.files, os.NewFile(uintptr(fd), l.String()))
			proto, _, _ := strings.Cut(l.String(), " ")
			g.names = append(g.names, fmt.Sprintf("%s-%d", proto, l.Port))
		}
		return nil
	})
	if err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

func portAdvice(err error) string {
	if errors.Is(err, unix.EADDRINUSE) {
		return ": its process does not share it (SO_REUSEPORT; share_port: true in the configuration), or belongs to another user: select that user with --user"
	}
	return ""
}

// openAs opens a bound socket owned by uid. It changes the thread's fsuid, so it must run on a thread that is
// discarded.
func openAs(uid int, l service.Listen, backlog int) (int, error) {
	family, typ := unix.AF_INET, unix.SOCK_DGRAM
	if l.V6 {
		family = unix.AF_INET6
	}
	if l.Proto == unix.IPPROTO_TCP {
		typ = unix.SOCK_STREAM
	}
	was, err := unix.SetfsuidRetUid(uid)
	if err != nil {
		return -1, err
	}
	fd, err := unix.Socket(family, typ|unix.SOCK_CLOEXEC, 0)
	if _, back := unix.SetfsuidRetUid(was); err != nil || back != nil {
		return fd, errors.Join(err, back)
	}
	if err := bindShared(fd, l, backlog); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func bindShared(fd int, l service.Listen, backlog int) error {
	options := []struct{ level, name, value int }{{unix.SOL_SOCKET, unix.SO_REUSEPORT, 1}}
	if l.Proto == unix.IPPROTO_TCP {
		options = append(options, struct{ level, name, value int }{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1})
	}
	addr, wildcard := l.Prefix.Addr(), !l.Prefix.IsValid() || l.Prefix.Bits() == 0
	if l.V6 {
		only := 0
		if !l.V4 {
			only = 1
		}
		options = append(options, struct{ level, name, value int }{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only})
	}
	if !wildcard { // bind to the first address of a prefix, even if no interface has it
		options = append(options, struct{ level, name, value int }{unix.IPPROTO_IP, unix.IP_FREEBIND, 1})
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return err
		}
	}
	if wildcard {
		addr = netip.IPv4Unspecified()
		if l.V6 {
			addr = netip.IPv6Unspecified()
		}
	}
	var sa unix.Sockaddr = &unix.SockaddrInet6{Port: int(l.Port), Addr: addr.As16()}
	if !l.V6 {
		sa = &unix.SockaddrInet4{Port: int(l.Port), Addr: addr.As4()}
	}
	if err := unix.Bind(fd, sa); err != nil {
		return err
	}
	if l.Proto == unix.IPPROTO_TCP {
		return unix.Listen(fd, max(backlog, 1))
	}
	return nil
}

// environ returns the variables of sd_listen_fds(3) except LISTEN_PID. Only the daemon's own process can set this one.
func (g *given) environ() []string {
	return []string{fmt.Sprintf("LISTEN_FDS=%d", len(g.files)), "LISTEN_FDNAMES=" + strings.Join(g.names, ":")}
}

// Close closes weir's descriptors of the sockets.
func (g *given) Close() {
	for _, f := range g.files {
		f.Close()
	}
}

// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Finder finds single sockets, over one netlink socket. The zero value is ready to use. It is not
// safe for concurrent use, and stays in the namespace of its first use.
type Finder struct{ c *netlink.Conn }

// TCP returns the established socket of this namespace from local to remote. The error wraps
// [ErrNoSocket] if there is none.
func (f *Finder) TCP(local, remote netip.AddrPort) (Socket, error) {
	if f.c == nil {
		c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
		if err != nil {
			return Socket{}, fmt.Errorf("find socket: open sock_diag: %w", err)
		}
		f.c = c
	}
	local = netip.AddrPortFrom(local.Addr().Unmap(), local.Port())
	remote = netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port())
	r := diagRequest{Family: unix.AF_INET, Protocol: unix.IPPROTO_TCP, States: 1 << Established,
		ID: sockID{Cookie: [2]uint32{^uint32(0), ^uint32(0)}}} // INET_DIAG_NOCOOKIE
	if local.Addr().Is6() {
		r.Family = unix.AF_INET6
	}
	r.ID.Src, r.ID.Dst = encodeAddr(r.Family, local.Addr()), encodeAddr(r.Family, remote.Addr())
	binary.BigEndian.PutUint16(r.ID.SrcPort[:], local.Port())
	binary.BigEndian.PutUint16(r.ID.DstPort[:], remote.Port())
	req, err := message(unix.SOCK_DIAG_BY_FAMILY, netlink.Request, r, netlink.NewAttributeEncoder())
	if err != nil {
		return Socket{}, fmt.Errorf("find socket: %w", err)
	}
	msgs, err := f.c.Execute(req)
	if errors.Is(err, unix.ENOENT) {
		return Socket{}, fmt.Errorf("find socket %s to %s: %w", local, remote, ErrNoSocket)
	}
	if err == nil && len(msgs) != 1 {
		err = fmt.Errorf("%d answers", len(msgs))
	}
	if err != nil {
		f.Close() // later answers may belong to this request
		return Socket{}, fmt.Errorf("find socket: %w", err)
	}
	return parse(msgs[0].Data, Query{Proto: unix.IPPROTO_TCP})
}

// Close closes the netlink socket. The next use reopens it.
func (f *Finder) Close() {
	if f.c != nil {
		_ = f.c.Close() // no data to lose
		f.c = nil
	}
}

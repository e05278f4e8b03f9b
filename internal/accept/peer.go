// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Peer is the party for counting connections.
type Peer struct {
	Net  netip.Prefix // of a remote TCP client; invalid for local clients
	UID  uint32       // effective user of a local client when it connected
	kind kind
}

type kind uint8

const (
	remote   kind = iota
	localTCP      // over the loopback interface
	unixUser
)

func (p Peer) String() string {
	if p.kind == remote {
		return p.Net.String()
	}
	return fmt.Sprintf("user %d", p.UID)
}

// trusted peers have no limit. Over TCP root has only a share, because its proxies act for others.
func (p Peer) trusted() bool { return p.kind == unixUser && (p.UID == 0 || int(p.UID) == os.Geteuid()) }

// identify asks the kernel for the peer of a connection.
func (l *Listener) identify(c net.Conn) (Peer, error) {
	switch c := c.(type) {
	case *net.UnixConn:
		cred, err := Credentials(c)
		if err != nil {
			return Peer{}, err
		}
		return Peer{UID: cred.Uid, kind: unixUser}, nil
	case *net.TCPConn:
		at, ok := c.RemoteAddr().(*net.TCPAddr)
		if !ok {
			return Peer{}, net.ErrClosed
		}
		if uid, ok := l.findUser(c, at.AddrPort()); ok {
			return Peer{UID: uid, kind: localTCP}, nil
		}
		return Peer{Net: prefix(at.AddrPort().Addr())}, nil
	}
	return Peer{}, nil // a connection type of a test
}

// findUser returns the user of a client on this host, from the kernel's list of sockets. An address
// does not identify a user, because all local users can use all local addresses.
func (l *Listener) findUser(c *net.TCPConn, at netip.AddrPort) (uint32, bool) {
	here, ok := c.LocalAddr().(*net.TCPAddr)
	if !ok {
		return 0, false
	}
	to := here.AddrPort()
	if a := at.Addr().Unmap(); !a.IsLoopback() && a != to.Addr().Unmap() {
		return 0, false
	}
	s, err := l.diag.TCP(at, to)
	return s.UID, err == nil && s.Inode != 0 // else it is already closed and has no user
}

// loopback is one peer, because every local process can choose its address in it.
var loopback = netip.MustParsePrefix("127.0.0.0/8")

func prefix(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	bits := 32
	if a.Is6() {
		bits = 64
	}
	if loopback.Contains(a) {
		return loopback
	}
	p, _ := a.Prefix(bits) // the prefix is never longer than the address
	return p
}

// Credentials returns the credentials of the process at the other end of a Unix socket. The kernel
// records them at connect(2), or at listen(2).
func Credentials(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return cred, errors.Join(cerr, err)
}

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

// Peer is the party whose connections are counted together.
type Peer struct {
	Net  netip.Prefix // of a TCP client of another host; invalid for local ones
	UID  uint32       // of a local client, effective, when it connected
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

// trusted peers may have as many connections as they like. Over TCP root has a share of
// its own, and no more: its proxies speak for others.
func (p Peer) trusted() bool { return p.kind == unixUser && (p.UID == 0 || int(p.UID) == os.Geteuid()) }

// identify asks the kernel who has connected.
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
	return Peer{}, nil // of a test's own kind
}

// findUser is the user of a client on this host, as the kernel lists its socket. All of
// them can have all of its addresses.
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
	return s.UID, err == nil && s.Inode != 0 // else it is closed already, and nobody's
}

// loopback is one peer: every local process can choose its address in there.
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
	p, _ := a.Prefix(bits) // an address has as many
	return p
}

// Credentials are those of the process at the other end of a Unix socket, as the
// kernel noted them when it connected, or when it began to listen.
func Credentials(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return cred, errors.Join(cerr, err)
}

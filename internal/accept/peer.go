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
	Net  netip.Prefix // of a TCP client; invalid for a Unix one
	UID  uint32       // of a Unix client, effective, when it connected
	unix bool
}

func (p Peer) String() string {
	if p.unix {
		return fmt.Sprintf("user %d", p.UID)
	}
	return p.Net.String()
}

// trusted peers may have as many connections as they like.
func (p Peer) trusted() bool { return p.unix && (p.UID == 0 || int(p.UID) == os.Geteuid()) }

// peerOf asks the kernel who has connected.
func peerOf(c net.Conn) (Peer, error) {
	switch c := c.(type) {
	case *net.UnixConn:
		cred, err := Credentials(c)
		if err != nil {
			return Peer{}, err
		}
		return Peer{UID: cred.Uid, unix: true}, nil
	case *net.TCPConn:
		at, ok := c.RemoteAddr().(*net.TCPAddr)
		if !ok {
			return Peer{}, net.ErrClosed
		}
		return Peer{Net: prefix(at.AddrPort().Addr())}, nil
	}
	return Peer{}, nil // of a test's own kind
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

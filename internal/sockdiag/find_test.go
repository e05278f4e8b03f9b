// SPDX-License-Identifier: Apache-2.0

package sockdiag_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/sockdiag"
)

// TestFind checks that the owner of a client's socket is found, for both families.
func TestFind(t *testing.T) {
	var f sockdiag.Finder
	defer f.Close()
	for _, network := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", network)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		for _, uid := range []int{0, 65534} {
			var c net.Conn
			nstest.AsUser(t, uid, func() (err error) { c, err = net.Dial("tcp", l.Addr().String()); return err })
			from, to := c.LocalAddr().(*net.TCPAddr).AddrPort(), l.Addr().(*net.TCPAddr).AddrPort()
			s, err := f.TCP(from, to)
			if err != nil || int(s.UID) != uid || s.Local != from || s.Inode == 0 {
				t.Errorf("%s of user %d: %+v, %v", from, uid, s, err)
			}
			c.Close()
			if s, err := f.TCP(netip.AddrPortFrom(from.Addr(), 1), to); !errors.Is(err, sockdiag.ErrNoSocket) {
				t.Errorf("no socket: %+v, %v", s, err)
			}
		}
	}
}

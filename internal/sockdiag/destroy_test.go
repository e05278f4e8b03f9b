// SPDX-License-Identifier: Apache-2.0

package sockdiag_test

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/sockdiag"
)

func TestDestroy(t *testing.T) {
	nstest.NeedRoot(t)
	l := listenTCP(t, "tcp4", "127.0.0.1:0")
	client := dialTCP(t, l.Addr().String())
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	q := sockdiag.Query{Proto: unix.IPPROTO_TCP, States: 1 << sockdiag.Established, LocalPort: addrPort(t, l.Addr()).Port()}
	s := one(t, q)

	impostor := s
	impostor.Cookie++
	if err := sockdiag.Destroy(impostor); !errors.Is(err, sockdiag.ErrNoSocket) {
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip("need: kernel with CONFIG_INET_DIAG_DESTROY")
		}
		t.Errorf("with another cookie: %v, want ErrNoSocket", err)
	}
	if err := sockdiag.Destroy(s); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1)
	if err := client.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Read(buf); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the peer reads %v, want ECONNRESET", err)
	}
	if _, err := server.Read(buf); !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("the owner reads %v, want ECONNABORTED", err)
	}
	if err := sockdiag.Destroy(s); !errors.Is(err, sockdiag.ErrNoSocket) {
		t.Errorf("second Destroy: %v, want ErrNoSocket", err)
	}
}

func TestDestroyV6AndUDP(t *testing.T) {
	nstest.NeedRoot(t)
	l := listenTCP(t, "tcp6", "[::1]:0")
	dialTCP(t, l.Addr().String())
	u := listenUDP(t, "udp4", "127.0.0.1:0")
	for _, q := range []sockdiag.Query{
		{Proto: unix.IPPROTO_TCP, States: 1 << sockdiag.Established, LocalPort: addrPort(t, l.Addr()).Port()},
		{Proto: unix.IPPROTO_UDP, LocalPort: addrPort(t, u.LocalAddr()).Port()},
	} {
		if err := sockdiag.Destroy(one(t, q)); err != nil {
			if errors.Is(err, errors.ErrUnsupported) {
				t.Skip("need: kernel with CONFIG_INET_DIAG_DESTROY")
			}
			t.Errorf("%+v: %v", q, err)
		}
		if s := dump(t, q); len(s) != 0 {
			t.Errorf("still there: %+v", s)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"errors"
	"net"
	"syscall"
	"testing"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
)

// TestPortZeroTwice listens at port 0 more than once. Each call gets its own socket, and so does
// the replacement, in the same order. A second listener at the process's own port gets the kernel's
// error, not the same socket.
func TestPortZeroTwice(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	join := func() *handoff.Member {
		t.Helper()
		m, err := handoff.Join(t.Context(), handoff.Options{Service: "talk", Name: "0", Keeper: w.socket, Timeout: patience})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		return m
	}
	listen := func(m *handoff.Member) (*handoff.Listener, net.Addr) {
		t.Helper()
		l, err := m.Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return l, l.Addr()
	}
	packets := func(m *handoff.Member) net.Addr {
		t.Helper()
		p, err := m.ListenPacket(t.Context(), "udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return p.LocalAddr()
	}
	old := join()
	first, a := listen(old)
	_, b := listen(old)
	p, q := packets(old), packets(old)
	if a.String() == b.String() || p.String() == q.String() {
		t.Fatalf("two sockets at port 0 are the same one: %v and %v, %v and %v", a, b, p, q)
	}
	if _, err := old.Listen(t.Context(), "tcp", a.String()); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a second listener at %v: %v", a, err)
	}
	if err := old.Ready(); err != nil {
		t.Fatal(err)
	}

	heir := join()
	_, a2 := listen(heir)
	_, b2 := listen(heir)
	if p2, q2 := packets(heir), packets(heir); a2.String() != a.String() || b2.String() != b.String() || p2.String() != p.String() || q2.String() != q.String() {
		t.Errorf("the replacement listens at %v, %v, %v, %v; want %v, %v, %v, %v", a2, b2, p2, q2, a, b, p, q)
	}

	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if l, c := listen(old); c.String() == b.String() {
		t.Errorf("the first label is free, and a new listener has the second's socket %v", c)
	} else if err := l.Close(); err != nil {
		t.Error(err)
	}
}

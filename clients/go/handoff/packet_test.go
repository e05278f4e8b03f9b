// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"errors"
	"net"
	"testing"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
)

// TestReplacedPacketConn checks that all read methods of a packet socket return ErrReplaced.
func TestReplacedPacketConn(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	l := w.join("0")
	p, err := l.Member().ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 10)
	reads := map[string]func() error{
		"Read":                func() error { _, err := p.Read(b); return err },
		"ReadFrom":            func() error { _, _, err := p.ReadFrom(b); return err },
		"ReadFromUDP":         func() error { _, _, err := p.ReadFromUDP(b); return err },
		"ReadFromUDPAddrPort": func() error { _, _, err := p.ReadFromUDPAddrPort(b); return err },
		"ReadMsgUDP":          func() error { _, _, _, _, err := p.ReadMsgUDP(b, b); return err },
		"ReadMsgUDPAddrPort":  func() error { _, _, _, _, err := p.ReadMsgUDPAddrPort(b, b); return err },
	}
	for name, read := range reads {
		u, err := net.Dial("udp", p.LocalAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		u.Write([]byte("x"))
		if err := read(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		u.Close()
	}
	type end struct {
		name string
		err  error
	}
	ends := make(chan end, len(reads))
	for name, read := range reads {
		go func() { ends <- end{name, read()} }()
	}
	w.join("0")
	for range reads {
		if e := <-ends; e.err != handoff.ErrReplaced {
			t.Errorf("%s: %v, want ErrReplaced", e.name, e.err)
		}
	}
	if err := p.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
	if err := reads["ReadMsgUDP"](); err != handoff.ErrReplaced {
		t.Errorf("%v", err)
	}
}

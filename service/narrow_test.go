// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// narrowSocket opens a socket of this process, modified by change.
func narrowSocket(t *testing.T, network, addr string, change func(fd int) error) {
	t.Helper()
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = change(int(fd)) })
		return errors.Join(cerr, err)
	}}
	lc.SetMultipathTCP(false)
	var s interface{ Close() error }
	var err error
	if strings.HasPrefix(network, "udp") {
		s, err = lc.ListenPacket(context.Background(), network, addr)
	} else {
		s, err = lc.Listen(context.Background(), network, addr)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
}

// A socket with less traffic than the slot is rejected, with the remedy.
func TestAdoptRefusesNarrowSockets(t *testing.T) {
	nstest.NeedRoot(t)
	toLoopback := func(fd int) error { return unix.BindToDevice(fd, "lo") }
	classic := func(fd int) error {
		f := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff}}
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &f[0]})
	}
	extended := func(fd int) error {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "Dual BSD/GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0xffff), asm.Return()}})
		if err != nil {
			return err
		}
		defer p.Close()
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, p.FD())
	}
	plain := func(int) error { return nil }
	for _, c := range []struct {
		name, network, addr string
		change              func(int) error
		listen              string
		why                 string // "": it is adopted
	}{
		{"interface", "udp4", "0.0.0.0:4739", toLoopback, "udp4 :4739", "bound to lo"},
		{"interface, TCP, IPv6", "tcp6", "[::]:1790", toLoopback, "tcp6 :1790", "bound to lo"},
		{"classic filter", "udp4", "0.0.0.0:4739", classic, "udp4 :4739", "a filter of its own"},
		{"filter of eBPF", "tcp4", "0.0.0.0:1790", extended, "tcp4 :1790", "a filter of its own"},
		{"one address of all", "udp4", "127.0.0.1:4739", plain, "udp4 :4739", "set bound: [udp 127.0.0.1:4739]"},
		{"one address of a prefix", "tcp4", "127.0.0.1:1790", plain, "tcp 127.0.0.0/8:1790", "bound to 127.0.0.1 only"},
		{"one address of all, IPv6", "udp6", "[::1]:4739", plain, "udp6 :4739", "bound to ::1 only"},
		{"its own address", "udp4", "127.0.0.1:4739", plain, "udp 127.0.0.1:4739", ""},
		{"IPv6 only", "udp6", "[::]:4739", plain, "udp :4739", "IPV6_V6ONLY"},
		{"IPv4 only", "udp4", "0.0.0.0:4739", plain, "udp :4739", "accepts IPv4 only"},
		{"plain", "udp4", "0.0.0.0:4739", plain, "udp4 :4739", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			narrowSocket(t, c.network, c.addr, c.change)
			m := Member{PID: os.Getpid()}
			if c.why == "" {
				adopt(t, m, c.listen)
				return
			}
			_, err := m.Adopt(t.Context(), here(t), spec(t, []string{c.listen}))
			if !errors.Is(err, ErrNarrow) && !errors.Is(err, ErrNoSocket) || !strings.Contains(err.Error(), c.why) {
				t.Errorf("%v; want %q", err, c.why)
			}
		})
	}
	t.Run("named by bound", func(t *testing.T) {
		narrowSocket(t, "udp4", "127.0.0.1:4739", plain)
		adopt(t, bound(t, Member{PID: os.Getpid()}, "udp 127.0.0.1:4739"), "udp4 :4739")
	})
}

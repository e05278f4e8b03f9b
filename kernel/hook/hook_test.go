// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// returns loads a socket filter with a constant verdict.
func returns(t *testing.T, verdict int32) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "test_verdict", Type: ebpf.SocketFilter, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func within(t *testing.T, ns *netns.Handle, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}

func TestNFT(t *testing.T) {
	nstest.NeedRoot(t)
	if err := NFTMatch.Check(); err != nil {
		t.Skip("need: kernel with the modules nft_compat and xt_bpf:", err)
	}
	p := nstest.NewWire(t)
	want := func(flows, when string) {
		t.Helper()
		if got := p.Flows(t, flows); got != flows {
			t.Errorf("%s: families %q arrive, want %q", when, got, flows)
		}
	}
	a := NFT{Table: "weir_test", Hook: kernel.Input, Priority: -5}
	pinned := func(verdict int32) string {
		prog := returns(t, verdict)
		path := filepath.Join(nstest.BPFFS, fmt.Sprintf("nft_%d_%s", verdict, p.NameA))
		if err := prog.Pin(path); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { prog.Unpin() })
		return path
	}
	drop, pass := pinned(0), pinned(1)
	note := func(a NFT, text string) {
		t.Helper()
		within(t, p.B, func() error {
			got, ok, err := a.Note()
			if ok != (text != "") || got != text {
				t.Errorf("note %q, %v, want %q", got, ok, text)
			}
			return err
		})
	}
	note(a, "")
	within(t, p.B, func() error { return a.Attach(drop, "first") })
	want("", "dropping")
	note(a, "first")
	within(t, p.B, func() error { return a.Attach(pass, "second") })
	want("46", "exchanged for one that passes")
	note(a, "second")
	moved := a
	moved.Priority, moved.Hook = 10, kernel.Prerouting
	within(t, p.B, func() error { return moved.Attach(drop, "third") })
	want("", "dropping at another hook")
	note(a, "")
	note(moved, "third")
	within(t, p.B, func() error { return errors.Join(a.Detach(), a.Detach()) })
	want("46", "detached")
	err := p.B.Do(func() error { return a.Attach(nstest.BPFFS+"/none", "x") })
	if !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), a.Table) {
		t.Errorf("without a program: %v", err)
	}
	note(a, "")
	if err := p.B.Do(func() error { return a.Attach("/"+strings.Repeat("x", 511), "x") }); err == nil || !strings.Contains(err.Error(), "511") {
		t.Errorf("a path that xt_bpf has no room for: %v", err)
	}
}

func TestSocketFilter(t *testing.T) {
	nstest.NeedRoot(t)
	w := nstest.NewWire(t)
	to := nstest.ListenUDP(t, w.B, netip.AddrPortFrom(w.B4, 0))
	from := nstest.ListenUDP(t, w.A, netip.AddrPortFrom(w.A4, 0))
	raw, err := to.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		s := &SocketFilter{FD: int(fd), Name: "udp test"}
		if err := s.Detach(); err != nil {
			t.Error(err)
		}
		if err := s.Attach(returns(t, 0)); err != nil {
			t.Fatal(err)
		}
		if nstest.Arrives(t, from, to, false) {
			t.Error("a datagram passes a filter that drops all")
		}
		other := &SocketFilter{FD: int(fd), Name: "udp test"}
		if err := other.Attach(returns(t, -1)); !errors.Is(err, kernel.ErrOccupied) || !strings.Contains(err.Error(), "eBPF") {
			t.Errorf("replaced an eBPF filter: %v", err)
		}
		if err := s.Attach(returns(t, -1)); err != nil {
			t.Errorf("exchanging its own: %v", err)
		}
		if !nstest.Arrives(t, from, to, true) {
			t.Error("a datagram does not pass a filter that passes all")
		}
		if err := errors.Join(s.Detach(), s.Detach()); err != nil {
			t.Error(err)
		}
		classic := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff}}
		if err := unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &classic[0]}); err != nil {
			t.Fatal(err)
		}
		if err := other.Attach(returns(t, 0)); !errors.Is(err, kernel.ErrOccupied) || !strings.Contains(err.Error(), "classic") {
			t.Errorf("replaced a classic filter: %v", err)
		}
		if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_LOCK_FILTER, 1); err != nil {
			t.Fatal(err)
		}
		if err := other.Attach(returns(t, 0)); !errors.Is(err, kernel.ErrOccupied) || !strings.Contains(err.Error(), "SO_LOCK_FILTER") {
			t.Errorf("a locked socket: %v", err)
		}
		if !nstest.Arrives(t, from, to, true) {
			t.Error("the application's own filter is gone")
		}
	})
}

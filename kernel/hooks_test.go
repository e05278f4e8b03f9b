// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// returns loads a program that returns the same for every packet.
func returns(t *testing.T, kind ebpf.ProgramType, verdict int32) *ebpf.Program {
	t.Helper()
	spec := &ebpf.ProgramSpec{Name: "test_verdict", Type: kind, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()}}
	if kind == ebpf.Netfilter {
		spec.AttachType = ebpf.AttachNetfilter
	}
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func needs(t *testing.T, n Need) {
	t.Helper()
	nstest.NeedRoot(t)
	if err := n.Check(); err != nil {
		t.Skip("need: kernel", n.Since+":", err)
	}
}

func within(t *testing.T, ns *netns.Handle, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}

// pipe is a wire with a socket at each end, for both families.
type pipe struct {
	*nstest.Wire
	t *testing.T
}

// flows says what arrives at b from a, and waits longer for what should.
func (p pipe) flows(wanted string) string {
	p.t.Helper()
	var out []string
	for _, f := range []struct {
		name     string
		from, to netip.Addr
	}{{"4", p.A4, p.B4}, {"6", p.A6, p.B6}} {
		to := nstest.ListenUDP(p.t, p.B, netip.AddrPortFrom(f.to, 0))
		from := nstest.ListenUDP(p.t, p.A, netip.AddrPortFrom(f.from, 0))
		if nstest.Arrives(p.t, from, to, strings.Contains(wanted, f.name)) {
			out = append(out, f.name)
		}
		to.Close()
		from.Close()
	}
	return strings.Join(out, "")
}

func (p pipe) want(flows, when string) {
	p.t.Helper()
	if got := p.flows(flows); got != flows {
		p.t.Errorf("%s: families %q arrive, want %q", when, got, flows)
	}
}

// Each link attaches, drops, moves to another program and ends.
func TestDeviceLinks(t *testing.T) {
	for _, c := range []struct {
		name       string
		need       Need
		kind       ebpf.ProgramType
		drop, pass int32
		at         func(w *nstest.Wire) (Attachment, *netns.Handle)
	}{
		{"tcx ingress", TCXLink, ebpf.SchedCLS, 2, -1, func(w *nstest.Wire) (Attachment, *netns.Handle) {
			return TCX{Ifindex: nstest.Ifindex(t, w.B, nstest.WireDevice), Device: nstest.WireDevice}, w.B
		}},
		{"tcx egress", TCXLink, ebpf.SchedCLS, 2, -1, func(w *nstest.Wire) (Attachment, *netns.Handle) {
			return TCX{Ifindex: nstest.Ifindex(t, w.A, nstest.WireDevice), Device: nstest.WireDevice, Egress: true}, w.A
		}},
		{"xdp", XDPProgram, ebpf.XDP, 1, 2, func(w *nstest.Wire) (Attachment, *netns.Handle) {
			return XDP{Ifindex: nstest.Ifindex(t, w.B, nstest.WireDevice), Device: nstest.WireDevice}, w.B
		}},
		{"xdp-generic", XDPProgram, ebpf.XDP, 1, 2, func(w *nstest.Wire) (Attachment, *netns.Handle) {
			return XDP{Ifindex: nstest.Ifindex(t, w.B, nstest.WireDevice), Device: nstest.WireDevice, Generic: true}, w.B
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			needs(t, c.need)
			p := pipe{nstest.NewWire(t), t}
			p.want("46", "before")
			a, ns := c.at(p.Wire)
			var ln Link
			within(t, ns, func() (err error) { ln, err = a.Attach(returns(t, c.kind, c.drop)); return err })
			defer ln.Close()
			if err := a.Verify(ln); err != nil {
				t.Error(err)
			}
			p.want("", "dropping")
			if err := MoveLink(ln, returns(t, c.kind, c.pass)); err != nil {
				t.Fatal(err)
			}
			p.want("46", "moved to a program that passes")
			within(t, ns, func() error {
				l, err := netlink.LinkByName(nstest.WireDevice)
				if err != nil {
					return err
				}
				return netlink.LinkDel(l)
			})
			eventually(t, "the link knows that its device is gone", func() bool { return errors.Is(a.Verify(ln), ErrDetached) })
		})
	}
}

// Somebody else's XDP program stays, and the error names it.
func TestXDPOccupied(t *testing.T) {
	needs(t, XDPProgram)
	w := nstest.NewWire(t)
	a := XDP{Ifindex: nstest.Ifindex(t, w.B, nstest.WireDevice), Device: nstest.WireDevice}
	first := returns(t, ebpf.XDP, 2)
	for name, attach := range map[string]func() (func(), error){
		"by link": func() (func(), error) {
			ln, err := a.Attach(first)
			return func() { ln.Close() }, err
		},
		"by netlink": func() (func(), error) {
			l, err := netlink.LinkByName(nstest.WireDevice)
			if err != nil {
				return nil, err
			}
			return func() { w.B.Do(func() error { return netlink.LinkSetXdpFd(l, -1) }) }, netlink.LinkSetXdpFd(l, first.FD())
		},
	} {
		t.Run(name, func(t *testing.T) {
			var end func()
			within(t, w.B, func() (err error) { end, err = attach(); return err })
			defer end()
			for _, generic := range []bool{false, true} {
				a.Generic = generic
				err := w.B.Do(func() error { _, err := a.Attach(returns(t, ebpf.XDP, 1)); return err })
				if !errors.Is(err, ErrOccupied) || !strings.Contains(err.Error(), "test_verdict") || !strings.Contains(err.Error(), "ip link set dev w0 xdp off") {
					t.Errorf("generic %v: %v", generic, err)
				}
			}
			pipe{w, t}.want("46", "refused")
		})
	}
}

func TestClsactFilter(t *testing.T) {
	needs(t, ClsactFilter)
	p := pipe{nstest.NewWire(t), t}
	for _, c := range []struct {
		name string
		ns   *netns.Handle
		tc   Clsact
	}{{"ingress", p.B, Clsact{Priority: 2}}, {"egress", p.A, Clsact{Egress: true, Priority: 2}}, {"the first priority", p.B, Clsact{}}} {
		t.Run(c.name, func(t *testing.T) {
			p := pipe{p.Wire, t}
			one, two := c.tc, c.tc
			one.Ifindex = nstest.Ifindex(t, c.ns, nstest.WireDevice)
			two.Ifindex = one.Ifindex
			one.Name, two.Name = "one", "two"
			drop, pass := returns(t, ebpf.SchedCLS, 2), returns(t, ebpf.SchedCLS, -1)
			within(t, c.ns, func() error { return errors.Join(one.Attach(pass), two.Attach(drop)) })
			p.want("", "the second of a priority drops")
			within(t, c.ns, func() error { return errors.Join(two.Attach(pass), one.Attach(drop)) })
			p.want("", "the first drops")
			within(t, c.ns, func() error {
				info, err := drop.Info()
				if err != nil {
					return err
				}
				id, _ := info.ID()
				if got, err := one.Program(); err != nil || got != uint32(id) {
					t.Errorf("runs program %d, %v; want %d", got, err, id)
				}
				return one.Detach(true)
			})
			p.want("46", "the first is gone, the second passes")
			within(t, c.ns, func() error {
				if there, err := one.HasQdisc(); err != nil || !there {
					t.Errorf("the qdisc went, though another filter uses it: %v", err)
				}
				if id, err := one.Program(); err != nil || id != 0 {
					t.Errorf("gone and still runs program %d, %v", id, err)
				}
				if err := two.Detach(true); err != nil {
					return err
				}
				if there, err := one.HasQdisc(); err != nil || there {
					t.Errorf("the qdisc stays: %v", err)
				}
				return one.Detach(true)
			})
		})
	}
}

func TestNFT(t *testing.T) {
	needs(t, NFTMatch)
	p := pipe{nstest.NewWire(t), t}
	a := NFT{Table: "weir_test", Hook: Input, Priority: -5}
	pinned := func(verdict int32) string {
		prog := returns(t, ebpf.SocketFilter, verdict)
		path := filepath.Join(nstest.BPFFS, fmt.Sprintf("nft_%d_%s", verdict, p.NameA))
		if err := prog.Pin(path); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { prog.Unpin() })
		return path
	}
	drop, pass := pinned(0), pinned(1)
	note := func(a NFT, want string) {
		t.Helper()
		within(t, p.B, func() error {
			got, ok, err := a.Note()
			if ok != (want != "") || got != want {
				t.Errorf("note %q, %v, want %q", got, ok, want)
			}
			return err
		})
	}
	note(a, "")
	within(t, p.B, func() error { return a.Attach(drop, "first") })
	p.want("", "dropping")
	note(a, "first")
	within(t, p.B, func() error { return a.Attach(pass, "second") })
	p.want("46", "exchanged for one that passes")
	note(a, "second")
	moved := a
	moved.Priority, moved.Hook = 10, Prerouting
	within(t, p.B, func() error { return moved.Attach(drop, "third") })
	p.want("", "dropping at another hook")
	note(a, "")
	note(moved, "third")
	within(t, p.B, func() error { return errors.Join(a.Detach(), a.Detach()) })
	p.want("46", "detached")
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
		if err := s.Attach(returns(t, ebpf.SocketFilter, 0)); err != nil {
			t.Fatal(err)
		}
		if nstest.Arrives(t, from, to, false) {
			t.Error("a datagram passes a filter that drops all")
		}
		other := &SocketFilter{FD: int(fd), Name: "udp test"}
		if err := other.Attach(returns(t, ebpf.SocketFilter, -1)); !errors.Is(err, ErrOccupied) || !strings.Contains(err.Error(), "eBPF") {
			t.Errorf("replaced an eBPF filter: %v", err)
		}
		if err := s.Attach(returns(t, ebpf.SocketFilter, -1)); err != nil {
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
		if err := other.Attach(returns(t, ebpf.SocketFilter, 0)); !errors.Is(err, ErrOccupied) || !strings.Contains(err.Error(), "classic") {
			t.Errorf("replaced a classic filter: %v", err)
		}
		if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_LOCK_FILTER, 1); err != nil {
			t.Fatal(err)
		}
		if err := other.Attach(returns(t, ebpf.SocketFilter, 0)); !errors.Is(err, ErrOccupied) || !strings.Contains(err.Error(), "SO_LOCK_FILTER") {
			t.Errorf("a locked socket: %v", err)
		}
		if !nstest.Arrives(t, from, to, true) {
			t.Error("the application's own filter is gone")
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// returns loads a program with a constant verdict.
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

func (p pipe) want(flows, when string) {
	p.t.Helper()
	if got := p.Flows(p.t, flows); got != flows {
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
			nstest.Until(t, "the link knows that its device is gone", func() bool { return errors.Is(a.Verify(ln), ErrDetached) })
		})
	}
}

// A foreign XDP program stays, and the error names it.
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

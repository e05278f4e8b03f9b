// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/units"
)

func program(t *testing.T, spec *ebpf.ProgramSpec) *ebpf.Program {
	t.Helper()
	spec.License = "Dual BSD/GPL"
	spec.Instructions = asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func attach(t *testing.T, a Attachment, p *ebpf.Program) link.Link {
	t.Helper()
	l, err := a.Attach(p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if err := a.Verify(l); err != nil {
		t.Errorf("%s: just attached: %v", a, err)
	}
	return l
}

func TestNetnsLookup(t *testing.T) {
	nstest.NeedRoot(t)
	name := fmt.Sprintf("weir-kernel-%d", os.Getpid())
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	a := NetnsLookup{FD: ns.FD(), Inode: ns.Inode()}
	if want := "sk_lookup of " + fmt.Sprintf("net:[%d]", ns.Inode()); a.String() != want {
		t.Errorf("named %q, want %q", a, want)
	}
	p := program(t, &ebpf.ProgramSpec{Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup})
	l := attach(t, a, p)
	scope := fmt.Sprint(ns.Inode())
	if NetnsGone(l, scope, 0) {
		t.Error("the namespace is taken to be gone")
	}
	if err := (NetnsLookup{FD: a.FD, Inode: a.Inode + 1}).Verify(l); !errors.Is(err, ErrDetached) {
		t.Errorf("link of another namespace: %v", err)
	}
	ns.Close()
	if err := netns.Delete(name); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "the link knows that its namespace is gone", func() bool { return NetnsGone(l, scope, 0) })
	if err := a.Verify(l); !errors.Is(err, ErrDetached) || !strings.Contains(err.Error(), a.String()) {
		t.Errorf("after the namespace went: %v", err)
	}
}

func TestRawTracepoint(t *testing.T) {
	nstest.NeedRoot(t)
	p := program(t, &ebpf.ProgramSpec{Type: ebpf.RawTracepoint})
	a := RawTracepoint{Name: "sched_process_exit"}
	l := attach(t, a, p)
	if here, err := netns.Current(); err != nil || NetnsGone(l, fmt.Sprint(here.Inode()), 0) {
		t.Error("a link without a namespace says that it is gone")
	}
	l.Close()
	if err := a.Verify(l); err == nil {
		t.Error("closed and still attached")
	}
	none := RawTracepoint{Name: "no_such_tracepoint"}
	if _, err := none.Attach(p); err == nil || !strings.Contains(err.Error(), "attach to tracepoint no_such_tracepoint") {
		t.Errorf("attached to a tracepoint that is not: %v", err)
	}
}

func TestCgroupAttachment(t *testing.T) {
	nstest.NeedRoot(t)
	root, err := units.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	dir := fmt.Sprintf("%s/weir-kernel-%d", root, os.Getpid())
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(dir)
	p := program(t, &ebpf.ProgramSpec{Type: ebpf.CGroupSock, AttachType: ebpf.AttachCGroupInet4PostBind})
	a := Cgroup{Path: dir, Hook: ebpf.AttachCGroupInet4PostBind}
	first := attach(t, a, p)
	second := attach(t, a, p) // beside the first
	for _, l := range []link.Link{first, second} {
		if err := a.Verify(l); err != nil {
			t.Error(err)
		}
	}
	second.Close()
	if err := a.Verify(first); err != nil {
		t.Errorf("another's end took it away: %v", err)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "the link knows that its cgroup is gone", func() bool { return errors.Is(a.Verify(first), ErrDetached) })
	if _, err := a.Attach(p); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("attached to a cgroup that is gone: %v", err)
	}
}

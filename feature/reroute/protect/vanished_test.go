// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// An interface deleted between the list and its attachment is no error. Its namespace may be ending.
func TestAttachToGoneInterface(t *testing.T) {
	nstest.NeedRoot(t)
	if err := kernel.TCXLink.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	s := &instance{ns: nstest.NewNetns(t)}
	if err := s.attachOne(1<<20, "gone", p); err != nil {
		t.Error(err)
	}
}

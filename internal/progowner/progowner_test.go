// SPDX-License-Identifier: Apache-2.0

package progowner

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// pass loads an XDP program with a name. It returns the program and its number.
func pass(t *testing.T, name string) (*ebpf.Program, uint32) {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return p, uint32(id)
}

func pin(t *testing.T, p *ebpf.Program, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	c, err := p.Clone()
	if err == nil {
		err = c.Pin(path)
		c.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestDescribe checks that a program is described with its pin and its process, and without them if
// there are none.
func TestDescribe(t *testing.T) {
	nstest.NeedRoot(t)
	p, id := pass(t, "xdp_fw")
	want := fmt.Sprintf("program %d \"xdp_fw\"", id)
	if got := Describe(id, 7); got != want {
		t.Errorf("alone: %s; want %s", got, want)
	}
	pin(t, p, filepath.Join(bpfFS, "fw", "prog"))
	fd, err := unix.FcntlInt(uintptr(p.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "program")
	defer f.Close()
	c := exec.Command("sleep", "60")
	c.ExtraFiles = []*os.File{f}
	nstest.Start(t, c)
	want += fmt.Sprintf(", pinned at /sys/fs/bpf/fw/prog, held by process %d (sleep)", c.Process.Pid)
	if got := Describe(id, 7); got != want {
		t.Errorf("kept: %s; want %s", got, want)
	}
}

// TestDispatched checks that programs behind libxdp's dispatcher are named in order, without
// programs of another device or of a former dispatcher.
func TestDispatched(t *testing.T) {
	nstest.NeedRoot(t)
	d, id := pass(t, "xdp_dispatcher")
	first, _ := pass(t, "xdp_filt")
	second, _ := pass(t, "xdp_dump")
	dir := filepath.Join(bpfFS, "xdp")
	if got := Describe(id, 7); !strings.HasSuffix(got, "libxdp's dispatcher") {
		t.Errorf("without pins: %s", got)
	}
	of := func(ifindex int, id uint32, n int) string {
		return filepath.Join(dir, fmt.Sprintf("dispatch-%d-%d", ifindex, id), fmt.Sprintf("prog%d-prog", n))
	}
	pin(t, first, of(7, id, 0))
	pin(t, second, of(7, id, 1))
	pin(t, d, of(8, id, 0))
	pin(t, d, of(7, id+1, 0))
	got := dispatched(dir, 7, id)
	if len(got) != 2 || !strings.HasSuffix(got[0], `"xdp_filt"`) || !strings.HasSuffix(got[1], `"xdp_dump"`) {
		t.Errorf("%q", got)
	}
	if text := Describe(id, 7); !strings.Contains(text, "libxdp's dispatcher with 2 programs (") {
		t.Error(text)
	}
	if slices.Contains(pins(dir, id+100000), of(7, id, 0)) {
		t.Error("pins of another program")
	}
}

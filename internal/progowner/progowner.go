// SPDX-License-Identifier: Apache-2.0

// Package progowner finds the owners of a BPF program: its pins and its processes, and libxdp's
// pins for programs behind its dispatcher.
package progowner

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/pidfd"
)

// Bounds of a search, because the result is only for an error text.
const (
	maxPins      = 4096
	maxFiles     = 1 << 16
	maxProcesses = 3 // named
)

// bpfFS is the default BPF file system of other loaders.
const bpfFS = "/sys/fs/bpf"

// dispatcher is the name of libxdp's program to run several at one XDP hook.
const dispatcher = "xdp_dispatcher"

// Describe describes the XDP program of a device: its number and name, its programs if it is
// libxdp's dispatcher, its pins and its processes. It omits unreadable parts.
func Describe(program uint32, ifindex int) string {
	p := hookorder.Read(program)
	out := []string{fmt.Sprintf("program %s", p)}
	if p.Name == dispatcher {
		out[0] += ", " + describeDispatcher(dispatched(filepath.Join(bpfFS, "xdp"), ifindex, program))
	}
	if paths := pins(bpfFS, program); len(paths) > 0 {
		out = append(out, "pinned at "+paths[0])
	}
	if all := processes(program); len(all) > 0 {
		more := ""
		if n := len(all) - maxProcesses; n > 0 {
			more = fmt.Sprintf(" and %d more", n)
		}
		out = append(out, "held by process "+strings.Join(all[:min(len(all), maxProcesses)], ", ")+more)
	}
	return strings.Join(out, ", ")
}

func describeDispatcher(names []string) string {
	switch len(names) {
	case 0:
		return "libxdp's dispatcher"
	case 1:
		return fmt.Sprintf("libxdp's dispatcher with 1 program (%s)", names[0])
	}
	return fmt.Sprintf("libxdp's dispatcher with %d programs (%s)", len(names), strings.Join(names, ", "))
}

// dispatched returns the names of the programs behind a libxdp dispatcher, in the order of
// execution. libxdp pins them below dir, in dispatch-IFINDEX-ID, as prog0-prog and so on.
func dispatched(dir string, ifindex int, dispatcher uint32) (names []string) {
	dir = filepath.Join(dir, fmt.Sprintf("dispatch-%d-%d", ifindex, dispatcher))
	for n := range 64 {
		p, err := ebpf.LoadPinnedProgram(filepath.Join(dir, fmt.Sprintf("prog%d-prog", n)), &ebpf.LoadPinOptions{ReadOnly: true})
		if errors.Is(err, os.ErrNotExist) {
			return names
		}
		name := "an unreadable program"
		if err == nil {
			if info, err := p.Info(); err == nil {
				id, _ := info.ID()
				name = hookorder.Read(uint32(id)).String()
			}
			p.Close()
		}
		names = append(names, name)
	}
	return names
}

// pins returns the paths below a directory with a pin of a program or of a link to it.
func pins(dir string, program uint32) (out []string) {
	seen := 0
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !d.Type().IsRegular() {
			return nil // removed meanwhile, or not accessible to this user
		}
		if seen++; seen > maxPins {
			return fs.SkipAll
		}
		if pinned(path, program) {
			out = append(out, path)
		}
		return nil
	})
	return out
}

func pinned(path string, program uint32) bool {
	if p, err := ebpf.LoadPinnedProgram(path, &ebpf.LoadPinOptions{ReadOnly: true}); err == nil {
		defer p.Close()
		info, err := p.Info()
		if err != nil {
			return false
		}
		id, _ := info.ID()
		return uint32(id) == program
	}
	ln, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return false // a map
	}
	defer ln.Close()
	info, err := ln.Info()
	return err == nil && uint32(info.Program) == program
}

// processes returns the processes with a program, or a link to it, open: "41 (xdp-fw)".
func processes(program uint32) (out []string) {
	line := fmt.Sprintf("\nprog_id:\t%d\n", program)
	files := 0
	for _, pid := range pidfd.All() {
		if pid == os.Getpid() {
			continue
		}
		d, err := pidfd.Ask(pid, func() (described, error) { return describe(pid, line) }, nil)
		if err == nil && d.has {
			comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			out = append(out, fmt.Sprintf("%d (%s)", pid, strings.TrimSpace(string(comm))))
		}
		if files += d.files; files > maxFiles {
			break
		}
	}
	return out
}

// described is the result of a search in a process's descriptors.
type described struct {
	has   bool
	files int
}

// describe reports whether a process has an open file with a line in its fdinfo.
func describe(pid int, line string) (described, error) {
	dir := fmt.Sprintf("/proc/%d/fdinfo", pid)
	d, err := os.Open(dir)
	if err != nil {
		return described{}, err
	}
	defer d.Close()
	names, _ := d.Readdirnames(maxFiles) // as far as they are readable
	has := slices.ContainsFunc(names, func(name string) bool {
		b, err := os.ReadFile(filepath.Join(dir, name))
		return err == nil && strings.Contains(string(b), line)
	})
	return described{has, len(names)}, nil
}

// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// SkReuseport is the program type that selects a socket within a reuseport group.
var SkReuseport = kernel.Need{Name: "sk_reuseport programs", Since: "4.19", Optional: true,
	For:    "engine sk_reuseport: steering with nothing in the namespace's lookup path",
	Remedy: "use a newer kernel, or engine sk_lookup", Probe: kernel.ProbeProgram(ebpf.SkReuseport)}

// ReuseportArray holds the sockets for such a program.
var ReuseportArray = kernel.Need{Name: "arrays of reuseport sockets", Since: "4.19", Optional: true,
	For: "engine sk_reuseport", Remedy: "use a newer kernel, or engine sk_lookup", Probe: kernel.ProbeMap(ebpf.ReusePortSockArray)}

// QueueMigration lets such a program choose another member for the connections in the queue of a closed listener.
var QueueMigration = kernel.Need{Name: "sk_reuseport programs for migration", Since: "5.14", Optional: true,
	For:    "migrate: connections in a dead member's queue continue at another member; without it they end",
	Remedy: "use a newer kernel",
	Probe: func() error {
		kernel.LiftMemlock()
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SkReuseport, AttachType: ebpf.AttachSkReuseportSelectOrMigrate, License: "Dual BSD/GPL",
			Instructions: asm.Instructions{asm.LoadMem(asm.R2, asm.R1, migratingSocket, asm.DWord), asm.Mov.Imm(asm.R0, 1), asm.Return()}})
		if v, ok := errors.AsType[*ebpf.VerifierError](err); ok && len(v.Log) > 0 {
			return errors.New("the kernel has no migrating_sk")
		} else if err != nil {
			return kernel.ExplainProbe(err)
		}
		return p.Close()
	}}

// migratingSocket is the offset of migrating_sk in struct sk_reuseport_md. Older kernels ignore the attach type, but not
// this access.
const migratingSocket = 48

// ReuseportGroup is a hook without a link: sockets of one user with the same address and port and SO_REUSEPORT. The
// program stays while the group has any socket.
type ReuseportGroup struct {
	FD   int    // any socket of the group
	Name string // name for errors: "udp 0.0.0.0:4739"
}

func (g ReuseportGroup) String() string { return "reuseport group of " + g.Name }

// Attach makes prog select for the group. It replaces the previous program: each packet meets one of the two.
func (g ReuseportGroup) Attach(prog *ebpf.Program) error {
	if err := unix.SetsockoptInt(g.FD, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, prog.FD()); err != nil {
		return fmt.Errorf("attach to the %s: %w", g, err)
	}
	return nil
}

// Detach restores the kernel's own selection. A group without a program is not an error.
func (g ReuseportGroup) Detach() error {
	err := unix.SetsockoptInt(g.FD, unix.SOL_SOCKET, unix.SO_DETACH_REUSEPORT_BPF, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("detach from the %s: %w", g, err)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
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

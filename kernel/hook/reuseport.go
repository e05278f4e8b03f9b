// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// SkReuseport is the program type that chooses within a group of sockets that
// share a port.
var SkReuseport = kernel.Need{Name: "sk_reuseport programs", Since: "4.19", Optional: true,
	For:    "engine sk_reuseport: steering with nothing in the namespace's lookup path",
	Remedy: "use a newer kernel, or engine sk_lookup", Probe: kernel.ProbeProgram(ebpf.SkReuseport)}

// ReuseportArray holds the sockets that such a program chooses from.
var ReuseportArray = kernel.Need{Name: "arrays of reuseport sockets", Since: "4.19", Optional: true,
	For: "engine sk_reuseport", Remedy: "use a newer kernel, or engine sk_lookup", Probe: kernel.ProbeMap(ebpf.ReusePortSockArray)}

// ReuseportGroup is a place where a program is attached without a link: the
// sockets of one user that share an address and port with SO_REUSEPORT. The
// program stays as long as the group has a socket, whoever's it is.
type ReuseportGroup struct {
	FD   int    // any socket of the group
	Name string // what it is, for errors: "udp 0.0.0.0:4739"
}

func (g ReuseportGroup) String() string { return "reuseport group of " + g.Name }

// Attach makes prog choose for the group, in place of the program before it:
// each packet meets one of the two.
func (g ReuseportGroup) Attach(prog *ebpf.Program) error {
	if err := unix.SetsockoptInt(g.FD, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, prog.FD()); err != nil {
		return fmt.Errorf("attaching to the %s: %w", g, err)
	}
	return nil
}

// Detach leaves the group to the kernel's own choice. A group without a program
// is no error.
func (g ReuseportGroup) Detach() error {
	err := unix.SetsockoptInt(g.FD, unix.SOL_SOCKET, unix.SO_DETACH_REUSEPORT_BPF, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("detaching from the %s: %w", g, err)
	}
	return nil
}

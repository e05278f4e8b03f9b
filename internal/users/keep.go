// SPDX-License-Identifier: Apache-2.0

package users

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// KeepOnly removes all capabilities except a set (one bit each) from this process and from programs
// started by it, for good. Without CAP_SETPCAP only this process loses them. It refuses a process
// with cgo, because it cannot reach its threads. Of a process of another user than root, no program
// inherits a capability, except by [OwnProgram]: systemd's AmbientCapabilities= would otherwise give
// them to a member's ready.command.
func KeepOnly(keep uint64) error {
	if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SETPCAP, 0, 0, 0); err == nil && has == 1 {
		for c := uintptr(0); c < 64; c++ {
			if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0); err != nil {
				break // past the kernel's last one
			} else if has == 0 || keep>>c&1 == 1 {
				continue
			}
			if _, _, e := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0); e == unix.EPERM {
				break // in the bounding set, but not in effect
			} else if e != 0 {
				return fmt.Errorf("drop capability %d: %w", c, e)
			}
		}
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	was := data
	for i := range data {
		part := uint32(keep >> (32 * i))
		data[i].Effective &= part
		data[i].Permitted &= part
		data[i].Inheritable = 0 // and with it the ambient ones (capabilities(7))
	}
	if data == was {
		return nil // weir-keeper.service forbids capset(2)
	}
	if _, _, e := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&data[0])), 0); e != 0 {
		return fmt.Errorf("drop capabilities: %w", e)
	}
	return nil
}

// OwnProgram starts this program again, in a new session and with the capabilities of this process.
func OwnProgram() *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setsid: true}
	if os.Geteuid() == 0 {
		return a // root's programs have them anyway
	}
	for c := range 64 {
		if Has(c) {
			a.AmbientCaps = append(a.AmbientCaps, uintptr(c))
		}
	}
	return a
}

// SeesAll reports whether this process can read the namespaces of all processes.
func SeesAll() bool { return os.Geteuid() == 0 || Has(unix.CAP_SYS_PTRACE) }

// Has reports whether a capability of this process is in effect.
func Has(capability int) bool {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return unix.Capget(&head, &data[0]) == nil && data[capability/32].Effective>>(capability%32)&1 == 1
}

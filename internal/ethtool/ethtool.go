// SPDX-License-Identifier: Apache-2.0

// Package ethtool switches offloads of a device, like ethtool -K.
package ethtool

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Set switches an offload of the device, in the network namespace of the calling thread. The
// command is one of unix.ETHTOOL_S….
func Set(device string, command uint32, on bool) error {
	if len(device) >= unix.IFNAMSIZ {
		return unix.ENAMETOOLONG
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// struct ethtool_value and the start of struct ifreq (linux/ethtool.h, linux/if.h)
	value := struct{ cmd, data uint32 }{cmd: command}
	if on {
		value.data = 1
	}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:], device)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return errno
	}
	return nil
}

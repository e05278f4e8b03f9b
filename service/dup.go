// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"os"
	"strconv"

	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
	"golang.org/x/sys/unix"
)

// DupSocket duplicates a socket from any process that has it open. It scans all processes: use it rarely. Close the
// duplicate with [pidfd.CloseDup].
func DupSocket(s sockdiag.Socket) (int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return -1, err
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if fd, err := dupFrom(pid, s); err == nil {
			return fd, nil
		}
	}
	return -1, fmt.Errorf("%w: no process has %s open", ErrNoSocket, s.Local)
}

func dupFrom(pid int, s sockdiag.Socket) (int, error) {
	p, err := pidfd.Open(pid)
	if err != nil {
		return -1, err
	}
	defer p.Close()
	held, err := p.Sockets()
	if err != nil {
		return -1, err
	}
	if len(held[s.Inode]) == 0 {
		return -1, ErrNoSocket
	}
	fd, err := p.Dup(held[s.Inode][0])
	if err != nil {
		return -1, err
	}
	// The descriptor number may have been reused meanwhile.
	if cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE); err != nil || cookie != s.Cookie {
		pidfd.CloseDup(fd)
		return -1, ErrNoSocket
	}
	return fd, nil
}

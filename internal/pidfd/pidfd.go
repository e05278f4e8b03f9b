// SPDX-License-Identifier: Apache-2.0

// Package pidfd inspects other processes through pidfds (pidfd_open(2), Linux 5.3). Unlike a pid, a
// pidfd never refers to another process after the first one has exited.
package pidfd

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrGone reports a process that does not exist, or no longer.
var ErrGone = errors.New("no such process")

// Process is one particular process, alive or not. It is safe for concurrent
// use, except for Close.
type Process struct {
	f   *os.File
	pid int
}

// Open opens a process. The error wraps [ErrGone] if there is none. A zombie can be opened: see
// Alive.
func Open(pid int) (*Process, error) {
	if pid <= 0 {
		return nil, fmt.Errorf("process %d: not a process id", pid)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	switch {
	case err == nil:
		return &Process{f: os.NewFile(uintptr(fd), "pidfd:"+strconv.Itoa(pid)), pid: pid}, nil
	case errors.Is(err, unix.ESRCH):
		return nil, fmt.Errorf("process %d: %w", pid, ErrGone)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT): // ENOENT since 6.13
		return nil, fmt.Errorf("process %d: that is a thread; give the process id (Tgid in /proc/%d/status): %w", pid, pid, err)
	case errors.Is(err, unix.ENOSYS):
		return nil, fmt.Errorf("process %d: pidfd_open needs Linux 5.3: %w", pid, err)
	}
	return nil, fmt.Errorf("process %d: pidfd_open: %w", pid, err)
}

// PID returns the process id passed to Open.
func (p *Process) PID() int { return p.pid }

// FD returns the pidfd, valid until Close. It becomes readable for poll when the process exits.
func (p *Process) FD() int { return int(p.f.Fd()) }

// Close closes the pidfd.
func (p *Process) Close() error { return p.f.Close() }

// Alive reports whether the process is running. Exited processes and zombies are not.
func (p *Process) Alive() bool {
	fds := []unix.PollFd{{Fd: int32(p.FD()), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return err == nil && n == 0
	}
}

// reaped reports whether the pid is free. /proc/PID may then describe another process.
func (p *Process) reaped() bool {
	return errors.Is(unix.PidfdSendSignal(p.FD(), 0, nil, 0), unix.ESRCH)
}

func (p *Process) gone() error { return fmt.Errorf("process %d: %w", p.pid, ErrGone) }

// Sockets lists the open sockets of the process: the inode number of each and its descriptors,
// ascending. The error wraps [ErrGone] after the process has exited.
func (p *Process) Sockets() (map[uint32][]int, error) {
	sockets := make(map[uint32][]int)
	var bad error
	err := eachLink(p.pid, func(name, target string) bool {
		inode, ok := socketInode(target)
		if !ok {
			return true
		}
		var fd int
		if fd, bad = strconv.Atoi(name); bad != nil {
			return false
		}
		sockets[inode] = append(sockets[inode], fd)
		return true
	})
	if !p.Alive() {
		return nil, p.gone()
	}
	if err = errors.Join(err, bad); err != nil {
		return nil, fmt.Errorf("descriptors of process %d: %w%s", p.pid, err, ptraceAdvice(err))
	}
	// The list was complete while the pid was still ours.
	if p.reaped() {
		return nil, p.gone()
	}
	for _, fds := range sockets {
		slices.Sort(fds)
	}
	return sockets, nil
}

// socketInode parses "socket:[4711]".
func socketInode(target string) (uint32, bool) {
	s, ok := strings.CutPrefix(target, "socket:[")
	if !ok {
		return 0, false
	}
	inode, err := strconv.ParseUint(strings.TrimSuffix(s, "]"), 10, 32)
	return uint32(inode), err == nil
}

// Dup duplicates a descriptor of the process into this one (pidfd_getfd(2), Linux 5.6),
// close-on-exec. Both refer to the same open socket or file, so socket options apply to both. The
// caller closes the duplicate. The error wraps [ErrGone] if the process has exited,
// [os.ErrPermission] if the caller may not trace it, and EBADF if it has closed fd.
func (p *Process) Dup(fd int) (int, error) {
	dup, err := Ask(p.pid, func() (int, error) { return unix.PidfdGetfd(p.FD(), fd, 0) }, func(dup int, err error) {
		if err == nil {
			CloseDup(dup)
		}
	})
	switch {
	case err == nil:
		return dup, nil
	case errors.Is(err, unix.ESRCH):
		return -1, p.gone()
	case errors.Is(err, unix.ENOSYS):
		return -1, fmt.Errorf("descriptor %d of process %d: pidfd_getfd needs Linux 5.6: %w", fd, p.pid, err)
	}
	return -1, fmt.Errorf("descriptor %d of process %d: %w%s", fd, p.pid, err, ptraceAdvice(err))
}

// ptraceAdvice returns the remedy for a refusal. The kernel requires PTRACE_MODE_READ to list
// descriptors and PTRACE_MODE_ATTACH to copy them.
func ptraceAdvice(err error) string {
	if !errors.Is(err, os.ErrPermission) {
		return ""
	}
	advice := " (run as root or with CAP_SYS_PTRACE"
	if yama, e := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); e == nil {
		if scope := strings.TrimSpace(string(yama)); scope != "0" {
			advice += "; kernel.yama.ptrace_scope is " + scope
			if scope == "3" {
				advice += ", which forbids it even to root until the next boot"
			}
		}
	}
	return advice + ")"
}

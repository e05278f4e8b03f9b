// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/pidfd"
)

// Peer is a connected process with credentials from the kernel (SO_PEERCRED, SO_PEERPIDFD), never from the process
// itself.
type Peer struct {
	PID int
	UID uint32 // effective, at connect
	GID uint32
}

// process is a peer with a pidfd.
type process struct {
	Peer
	start uint64   // start time; with the PID, unique until reboot
	pidfd *os.File // in the poller: readable once the process has exited
}

// identify returns the process at the other end of a connection.
func identify(u *net.UnixConn) (*process, error) {
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	fd := -1
	cerr := raw.Control(func(s uintptr) {
		if cred, err = unix.GetsockoptUcred(int(s), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		// Before Linux 6.5 the PID must suffice. It cannot be reused while the connecting process exists, and the
		// checks below verify that it does.
		if fd, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err != nil {
			fd, err = unix.PidfdOpen(int(cred.Pid), 0)
		}
	})
	if err = errors.Join(cerr, err); err != nil {
		return nil, fmt.Errorf("identify the peer (is it in another PID namespace?): %w", err)
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("watch process %d: %w", cred.Pid, err)
	}
	p := &process{Peer: Peer{int(cred.Pid), cred.Uid, cred.Gid}, pidfd: os.NewFile(uintptr(fd), "pidfd")}
	if p.start, err = pidfd.StartTime(p.PID); err != nil || p.exited() {
		p.pidfd.Close()
		return nil, fmt.Errorf("process %d has exited", p.PID)
	}
	return p, nil
}

// exited reports whether the process has exited: none of its threads uses a socket any more.
func (p *process) exited() bool {
	gone := false
	raw, err := p.pidfd.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { gone = readable(fd) })
	}
	return gone || err != nil
}

// wait waits until the process has exited, or ctx is done.
func (p *process) wait(ctx context.Context) error {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	// Do not close it: exited uses it until the keeper has ended.
	stop := context.AfterFunc(ctx, func() { p.pidfd.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	return raw.Read(readable)
}

func (p *process) same(q *process) bool { return p.PID == q.PID && p.start == q.start }

func readable(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return n > 0 || err != nil && err != unix.EINTR
}

// SPDX-License-Identifier: Apache-2.0

package sock

import "golang.org/x/sys/unix"

// Lock acquires a session for this process and reports whether it has it. It takes a record lock on
// the socket (fcntl(2), F_SETLK). The kernel grants the lock to one process at a time, even if
// several have duplicates of the socket. Two processes can both believe that they own a session,
// after a crash of the keeper or a long pause of one of them. With the lock only one serves it.
//
// The kernel releases the lock when the process ends, or closes any duplicate of the socket. The
// lock has no effect within one process. A process must unlock a session before it gives it away. A
// process without Lock is served as before.
func Lock(fd int) bool {
	err := unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	return err != unix.EAGAIN && err != unix.EACCES
}

// Unlock releases the session for other processes.
func Unlock(fd int) {
	_ = unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_UNLCK})
}

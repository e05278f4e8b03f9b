// SPDX-License-Identifier: Apache-2.0

package sock

import "golang.org/x/sys/unix"

// Lock says whether a session is this process's to read and write. It takes a record lock on the socket (fcntl(2), F_SETLK),
// which the kernel gives to one process at a time, whoever else has a duplicate of the socket: so two processes that both
// believe that they were given a session, because the keeper went in the middle or one of them stood still, do not both serve
// it. The lock ends with the process, or when it closes any duplicate of the socket; within one process there is none.
//
// Who gives a session away unlocks it first. Whoever does not lock is served as before.
func Lock(fd int) bool {
	err := unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	return err != unix.EAGAIN && err != unix.EACCES
}

// Unlock lets another process lock the session.
func Unlock(fd int) {
	_ = unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_UNLCK})
}

// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// AsUser calls f on a thread with the effective user uid. For the kernel, sockets created by f
// belong to that user.
func AsUser(t testing.TB, uid int, f func() error) {
	t.Helper()
	NeedRoot(t)
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); e != 0 {
			done <- e
			return
		}
		done <- f()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

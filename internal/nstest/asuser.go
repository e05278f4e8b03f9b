// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// AsUser calls f on a thread whose effective user is uid. A socket that f has listen is
// that user's to the kernel.
func AsUser(t testing.TB, uid int, f func() error) {
	t.Helper()
	NeedRoot(t)
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and not unlocked: the thread ends with the goroutine
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

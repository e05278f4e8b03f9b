// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// errGoexit is returned by Do if f ended its goroutine instead of returning, as testing.T.FailNow
// does.
var errGoexit = errors.New("the function ended its goroutine (runtime.Goexit) inside the namespace")

// Do runs f inside the namespace on its own OS thread, and returns f's error. The thread is
// discarded afterwards. The caller's thread never leaves its namespace. Sockets opened by f stay in
// the namespace. Goroutines started by f do not run in it. Mounts are the caller's: bpffs and
// cgroup2 are visible as before, unlike under `ip netns exec`. A panic of f is raised in the
// caller.
func (h *Handle) Do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(h.FD(), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter %s: %w (needs CAP_SYS_ADMIN)", h, err)
		}
		return f()
	})
}

// onThread runs f on a thread never reused, with the mounts of the calling thread.
func onThread(f func() error) error {
	mnt, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return fmt.Errorf("open the current mount namespace: %w", err)
	}
	defer mnt.Close()
	cwd, err := os.Getwd()
	if err != nil {
		cwd = "/"
	}
	err = errGoexit
	var crash any
	onSpareThread(func() {
		defer func() {
			if r := recover(); r != nil {
				crash = fmt.Sprintf("%v\n\nin the thread of another namespace:\n%s", r, debug.Stack())
			}
		}()
		if e := keepMounts(int(mnt.Fd()), cwd); e != nil {
			err = e
			return
		}
		err = f()
	})
	if crash != nil {
		panic(crash)
	}
	return err
}

// onSpareThread runs f on a thread other than the main one. The thread ends with f. The runtime
// cannot discard the main thread, only park it for good. And other programs identify this process
// by /proc/PID/ns, the main thread's namespaces.
func onSpareThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Without an Unlock the runtime ends the thread with the goroutine.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// While this goroutine holds the main thread, the next one gets another.
			onSpareThread(f)
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

// keepMounts moves the calling thread to the mount namespace of fd. New threads start in the
// process's one. The caller's differs if its thread has unshared its own, as tests do.
func keepMounts(fd int, cwd string) error {
	var want, have unix.Stat_t
	if err := unix.Fstat(fd, &want); err != nil {
		return fmt.Errorf("stat the mount namespace: %w", err)
	}
	if err := unix.Stat("/proc/thread-self/ns/mnt", &have); err != nil {
		return fmt.Errorf("stat the mount namespace: %w", err)
	}
	if want.Dev == have.Dev && want.Ino == have.Ino {
		return nil
	}
	// setns refuses a thread with a shared root and working directory.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare the working directory: %w", err)
	}
	if err := unix.Setns(fd, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the caller's mount namespace: %w", err)
	}
	return unix.Chdir(cwd)
}

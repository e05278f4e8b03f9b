// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
	"golang.org/x/sys/unix"
)

// execStuck opens a UDP socket and a file, and executes another program. The execve closes the file.
func execStuck(args []string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: 2055})
	}
	if err == nil {
		_, err = unix.Open(args[0], unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return err
	}
	fmt.Println("ready")
	return syscall.Exec("/bin/sleep", []string{"sleep", "600"}, nil)
}

// within fails the test if f does not return in time.
func within(t *testing.T, what string, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(10 * time.Second):
		t.Fatalf("%s waits for another user", what)
		return nil
	}
}

// waits reports whether f blocks for a while. It does not wait for its end.
func waits(f func()) bool {
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
		return false
	case <-time.After(300 * time.Millisecond):
		return true
	}
}

// A process blocked in execve by its user does not block adoption, checks or queries for a socket's owner.
func TestProcessThatDoesNotAnswer(t *testing.T) {
	file := nstest.NewStubborn(t, nstest.FuseFlush)
	defer file.Release()
	c := nstest.StartReady(t, nstest.Child("exec stuck", file.Path))
	<-file.Asked
	if !waits(func() { _, _ = os.Readlink(fmt.Sprintf("/proc/%d/ns/net", c.PID())) }) {
		t.Skip("need: kernel: a process in execve keeps nobody waiting here")
	}
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	spec := Spec{Name: "x", Listen: []Listen{{Proto: unix.IPPROTO_UDP, Port: 2055, V4: true}}}
	err = within(t, "adoption", func() error { _, err := Member{PID: c.PID()}.Adopt(t.Context(), ns, spec); return err })
	if !errors.Is(err, bounded.ErrStuck) {
		t.Errorf("adoption: %v", err)
	}
	err = within(t, "start time", func() error { _, err := pidfd.StartTime(c.PID()); return err })
	if !errors.Is(err, bounded.ErrStuck) {
		t.Errorf("start time: %v", err)
	}
	if err := within(t, "the tree of processes", func() error { _, err := ReadTree(); return err }); err != nil {
		t.Error(err)
	}
	_ = within(t, "the search for a socket's processes", func() error { pidfd.Holders(1); return nil })
	err = within(t, "the search for a network namespace", func() error { _, err := netns.Find("", netns.ID{Inode: 1}); return err })
	if !errors.Is(err, netns.ErrGone) {
		t.Errorf("a namespace of no process: %v", err)
	}
	ready := Ready{Command: []string{"/bin/true"}}
	err = within(t, "another member's check", func() error { return ready.Check(t.Context(), ns, Asked{PID: os.Getpid()}) })
	if err != nil {
		t.Error("another member's check:", err)
	}
}

// A socket kept locked by its owner is not adopted, and blocks nobody.
func TestSocketThatDoesNotAnswer(t *testing.T) {
	nstest.NeedRoot(t)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	release := nstest.HoldLock(t, fd, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}})
	defer release()
	if err := within(t, "a look at a socket", func() error { return Narrow(fd) }); !errors.Is(err, bounded.ErrStuck) {
		t.Errorf("%v", err)
	}
}

// A check blocked by a file system, beyond the reach of signals, is abandoned. The number of such checks is bounded.
func TestCheckThatCannotBeKilled(t *testing.T) {
	file := nstest.NewStubborn(t, nstest.FuseRead)
	defer file.Release()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if !waits(func() { _ = exec.Command("/bin/cat", file.Path).Run() }) {
		t.Skip("need: kernel: /bin/cat does not wait for FUSE here")
	}
	ready := Ready{Command: []string{"/bin/cat", file.Path}, Timeout: 200 * time.Millisecond}
	for range 3 {
		err := within(t, "a check", func() error { return ready.Check(t.Context(), ns, Asked{PID: os.Getpid()}) })
		if !errors.Is(err, ErrNotReady) || !errors.Is(err, bounded.ErrStuck) {
			t.Error(err)
		}
	}
}

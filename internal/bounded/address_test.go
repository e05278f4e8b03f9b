// SPDX-License-Identifier: Apache-2.0

package bounded_test

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/nstest"
)

// playAddress reads the addresses of its descriptor 3 and collects garbage meanwhile.
func playAddress([]string) error {
	runtime.GOMAXPROCS(1)
	for _, call := range []func(int) (unix.Sockaddr, error){bounded.Getsockname, bounded.Getpeername} {
		asked := make(chan struct{})
		go func() {
			close(asked)
			_, _ = call(3) // it returns when the lock's owner releases it
		}()
		<-asked
		runtime.Gosched()
		runtime.GC()
	}
	fmt.Println("collected")
	return nil
}

// TestAddressOfLockedSocket checks that a process continues, even on one CPU, while it reads the
// address of a socket locked by another process.
func TestAddressOfLockedSocket(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(listener)
	if err := unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(listener, 1); err != nil {
		t.Fatal(err)
	}
	to, err := bounded.Getsockname(listener)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(fd, to); err != nil {
		t.Fatal(err)
	}
	if peer, err := bounded.Getpeername(fd); err != nil || text(peer) != text(to) {
		t.Errorf("the peer is %s, %v, want %s", text(peer), err, text(to))
	}
	release := nstest.HoldLock(t, fd, nil)
	defer release()
	c := nstest.Child("address")
	c.ExtraFiles = []*os.File{f}
	p := nstest.Start(t, c)
	stuck := time.AfterFunc(10*time.Second, release) // nothing else ends the wait
	p.Expect("collected")
	if !stuck.Stop() {
		t.Error("it stood still until the lock was free")
	}
	release() // a process ends only after its calls have returned
}

// TestAddresses compares the addresses with package unix.
func TestAddresses(t *testing.T) {
	for family, at := range map[int]unix.Sockaddr{unix.AF_INET: &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}, unix.AF_INET6: &unix.SockaddrInet6{Addr: [16]byte{15: 1}}} {
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if err := unix.Bind(fd, at); err != nil {
			t.Fatal(err)
		}
		want, err := unix.Getsockname(fd)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := bounded.Getsockname(fd); err != nil || text(got) != text(want) {
			t.Errorf("%s, %v, want %s", text(got), err, text(want))
		}
		if _, err := bounded.Getpeername(fd); err != unix.ENOTCONN {
			t.Errorf("the peer of an unconnected socket: %v", err)
		}
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := bounded.Getsockname(fd); err != unix.EAFNOSUPPORT {
		t.Errorf("a Unix socket: %v", err)
	}
}

// text formats an address without internal data of package unix.
func text(a unix.Sockaddr) string {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return fmt.Sprint(a.Addr, a.Port)
	case *unix.SockaddrInet6:
		return fmt.Sprint(a.Addr, a.Port, a.ZoneId)
	}
	return "none"
}

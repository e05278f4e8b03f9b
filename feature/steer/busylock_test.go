// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// TestSocketLockIsHeld: a locked socket blocks neither its insertion into a map nor the listing of all groups. After
// the unlock the socket is not in the map either, because its entry may have another use.
func TestSocketLockIsHeld(t *testing.T) {
	nstest.NeedRoot(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.SockMap, KeySize: 4, ValueSize: 8, MaxEntries: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := engine.PutSocket(m, 0, fd); err != nil {
		t.Fatal("a socket of a quiet owner:", err)
	}
	release := nstest.HoldLock(t, fd, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}})
	defer release()
	done := make(chan error, 2)
	go func() { done <- engine.PutSocket(m, 1, fd) }()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	go func() { _, err := engine.ListGroups(ns)(); done <- err }()
	for range 2 {
		select {
		case err := <-done:
			if err != nil && !errors.Is(err, bounded.ErrStuck) {
				t.Error(err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("the socket's owner holds up a change")
		}
	}
	release()
	var cookie uint64
	nstest.Until(t, "the socket has left the map", func() bool { return m.Lookup(uint32(1), &cookie) != nil })
}

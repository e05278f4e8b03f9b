// SPDX-License-Identifier: Apache-2.0

package dump_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/nstest"
)

// TestLinksChange lists links while others come and go.
func TestLinksChange(t *testing.T) {
	nstest.NeedRoot(t)
	done, ended := make(chan struct{}), make(chan error, 1)
	inNew := func(f func() error) error { // in a namespace of this test's own
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		return errors.Join(unix.Unshare(unix.CLONE_NEWNET), f())
	}
	ready := make(chan int)
	go func() {
		ended <- inNew(func() error {
			for i := range 100 { // several messages a listing
				if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint("d", i)}, PeerName: fmt.Sprint("e", i)}); err != nil {
					return err
				}
			}
			ready <- unix.Gettid()
			for {
				select {
				case <-done:
					return nil
				default:
				}
				l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "coming"}, PeerName: "going"}
				if err := errors.Join(netlink.LinkAdd(l), netlink.LinkDel(l)); err != nil {
					return err
				}
			}
		})
	}()
	var tid int
	select {
	case err := <-ended:
		t.Fatal(err)
	case tid = <-ready:
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		result <- func() error {
			fd, err := unix.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", tid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
				return err
			}
			interrupted := 0
			for range 300 {
				if _, err := netlink.LinkList(); errors.Is(err, netlink.ErrDumpInterrupted) {
					interrupted++
				}
				all, err := dump.LinkList()
				if err != nil || len(all) < 201 {
					return fmt.Errorf("%d links, %w", len(all), err)
				}
			}
			t.Logf("%d of 300 listings of package netlink were interrupted", interrupted)
			return nil
		}()
	}()
	if err := <-result; err != nil {
		t.Error(err)
	}
	close(done)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

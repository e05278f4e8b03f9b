// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
)

// The kernel thread of an interface carries packets up the stack, not the sender.
func TestWire(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	ends := map[string]*netns.Handle{}
	for _, name := range []string{"a", "b"} {
		h, err := netns.Create(fmt.Sprintf("weir-topo-%d-%s", os.Getpid(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.Close(); _ = netns.Delete(fmt.Sprintf("weir-topo-%d-%s", os.Getpid(), name)) })
		ends[name] = h
	}
	unique := fmt.Sprintf("t%x", os.Getpid()&0xffff)
	pid, _, err := Wire(End{ends["a"], unique, []netip.Prefix{netip.MustParsePrefix("10.1.1.1/30")}},
		End{ends["b"], unique[1:] + "u", []netip.Prefix{netip.MustParsePrefix("10.1.1.2/30")}})
	if err != nil {
		t.Fatal(err)
	}
	before := cpu(t, pid)
	err = ends["b"].Do(func() error {
		c, err := net.Dial("udp", "10.1.1.1:9")
		if err != nil {
			return err
		}
		defer c.Close()
		for deadline := time.Now().Add(60 * time.Second); cpu(t, pid)-before < 5*time.Millisecond; {
			if time.Now().After(deadline) {
				return fmt.Errorf("the thread of %s used %s only", unique, cpu(t, pid)-before)
			}
			_, _ = c.Write(make([]byte, 400)) // refused
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// cpu returns the CPU time of a process (its CPU clock, CPUCLOCK_SCHED in linux/posix-timers.h).
func cpu(t *testing.T, pid int) time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &ts); err != nil {
		t.Error(err)
	}
	return time.Duration(ts.Nano())
}

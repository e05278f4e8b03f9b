// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// A process with several sockets in one reuseport group registers the group.
func TestRegisterGroup(t *testing.T) {
	nstest.NeedRoot(t)
	s := session{t, root(t)}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return err
	}}
	config.SetMultipathTCP(false)
	var accepted [2]atomic.Int64
	for i := range accepted {
		l, err := config.Listen(t.Context(), "tcp4", "127.0.0.1:8000")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				accepted[i].Add(1)
				c.Close()
			}
		}()
	}
	s.run(0, "", "bind", "add", "www", "tcp", "127.1.0.0/16", "80")
	s.run(0, `registered for www: tcp4\n`, "steer", "register", "www", "tcp", "127.0.0.1", "8000", "--pid", fmt.Sprint(os.Getpid()), "--wait", "0s")
	const clients = 64
	for i := range clients {
		c, err := net.DialTimeout("tcp4", fmt.Sprintf("127.1.0.%d:80", i), 30*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		one := make([]byte, 1)
		c.Read(one) // until it is accepted and closed
		c.Close()
	}
	a, b := accepted[0].Load(), accepted[1].Load()
	if a == 0 || b == 0 || a+b != clients {
		t.Errorf("the group's sockets accepted %d and %d, want some each and %d together", a, b, clients)
	}
}

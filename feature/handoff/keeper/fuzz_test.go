// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
)

// FuzzInherit takes over arbitrary predecessor data. No session may exist without its socket, and the keeper's
// charges must match its sessions.
func FuzzInherit(f *testing.F) {
	f.Add(`{"version":1,"sessions":[{"id":COOKIE,"kind":0,"service":"s","member":"0","read":0,"written":0,"state":"AAA=","unread":"","has_state":true,"waits":"2026-11-25T00:00:00Z"}]}`)
	f.Add(`{"version":1,"sessions":[{"id":COOKIE,"kind":0,"read":18446744073709551615,"written":3,"unread":"AAAA"},{"id":COOKIE},{"id":1}]}`)
	f.Add(`{"version":1,"sessions":[{"id":COOKIE,"kind":255,"moves":-1,"label":"\u0000"}]}`)
	f.Add(`{"version":2,"sessions":[{"id":COOKIE}]}`)
	f.Add(`{"version":1,"sessions":[{"id":COOKIE,"service":"s"}, x`)
	f.Add(``)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { l.Close() })
	f.Fuzz(func(t *testing.T, list string) {
		client, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		server, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		socket, err := server.(*net.TCPConn).File()
		server.Close()
		if err != nil {
			t.Fatal(err)
		}
		raw, err := socket.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var cookie uint64
		raw.Control(func(fd uintptr) { cookie, err = sock.Cookie(int(fd)) })
		if err != nil {
			t.Fatal(err)
		}
		fd, err := unix.MemfdCreate("list", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		memfd := os.NewFile(uintptr(fd), "memfd")
		if _, err := memfd.WriteString(strings.ReplaceAll(list, "COOKIE", strconv.FormatUint(cookie, 10))); err != nil {
			t.Fatal(err)
		}
		k := New(Options{})
		err = k.Inherit([]*os.File{memfd, socket})
		if n := len(k.sessions); n > 1 || n == 0 && err == nil {
			t.Errorf("%d sessions of one socket: %v", n, err)
		}
		for id, s := range k.sessions {
			if id != cookie || s.size() < 0 || whole(s) != nil {
				t.Errorf("session %d of the socket %d: %+v", id, cookie, s)
			}
			k.remove(s, true)
		}
		for _, h := range k.holdings {
			if h != (holding{}) {
				t.Errorf("charged for nothing: %+v", h)
			}
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

var errStop = errors.New("cannot be stopped")

// TestDumpRefuses checks that a failed dump, at any step, leaves the session running and the socket unchanged.
func TestDumpRefuses(t *testing.T) {
	oob := func(t *testing.T, client, server *net.TCPConn) {
		in(t, client, func(fd int) { ok(t, unix.Sendto(fd, []byte("!"), unix.MSG_OOB, nil)) })
		nstest.Until(t, "the urgent byte is there", func() bool { return unread(t, server) >= 0 && urgent(t, server) })
	}
	for _, tc := range []struct {
		name    string
		want    error
		prepare func(t *testing.T, client, server *net.TCPConn)
		o       DumpOptions
		extra   int // bytes in the client's stream before the chat
	}{
		{"queues above the limit", errTooLarge, func(t *testing.T, client, server *net.TCPConn) {
			write(t, client, 5000, 0)
			nstest.Until(t, "5000 bytes are there", func() bool { return unread(t, server) == 5000 })
		}, DumpOptions{Limit: 4999}, 5000},
		{"packets that cannot be stopped", errStop, nil, DumpOptions{Stop: func(Flow) (func(), error) { return nil, errStop }}, 0},
		{"urgent data", errUrgent, oob, DumpOptions{}, 0},
		{"urgent data that was read, with data behind it", errUrgent, func(t *testing.T, client, server *net.TCPConn) {
			write(t, client, 10, 0)
			oob(t, client, server)
			write(t, client, 10, 10)
			nstest.Until(t, "it can be read", func() bool {
				var n int
				in(t, server, func(fd int) { n, _, _ = unix.Recvfrom(fd, make([]byte, 1), unix.MSG_OOB|unix.MSG_DONTWAIT) })
				return n == 1
			})
			nstest.Until(t, "the data behind it is there", func() (all bool) {
				in(t, server, func(fd int) {
					i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
					all = err == nil && i.Bytes_received == 21
				})
				return all
			})
		}, DumpOptions{}, 20},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			client, server := w.pair("tcp4", nil, nil)
			in(t, server, func(fd int) { ok(t, setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)) })
			if tc.prepare != nil {
				tc.prepare(t, client, server)
			}
			before := socketOf(t, server)
			stopped, released := 0, 0
			if tc.o.Stop == nil {
				tc.o.Stop = func(Flow) (func(), error) { stopped++; return func() { released++ }, nil }
			}
			if _, err := DumpConn(server, tc.o); !errors.Is(err, tc.want) {
				t.Errorf("dump: %v, want %v", err, tc.want)
			}
			if stopped != released || errors.Is(tc.want, errTooLarge) && stopped != 0 {
				t.Errorf("stopped %d times, released %d times", stopped, released)
			}
			if after := socketOf(t, server); after != before {
				t.Errorf("the socket was\n%s, is\n%s", before, after)
			}
			drain(t, server, tc.extra)
			chat(t, client, server)
			w.WantNoResets()
		})
	}
}

// drain reads data written earlier by the test.
func drain(t *testing.T, c net.Conn, n int) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, n)
	for have := 0; have < n; {
		m, err := c.Read(b[:n-have])
		if err != nil {
			t.Fatal(err)
		}
		if err := verify(b[:m], uint64(have)); err != nil {
			t.Fatal(err)
		}
		have += m
	}
}

// socketOf describes the settings that a failed dump must not change.
func socketOf(t testing.TB, c *net.TCPConn) (s string) {
	in(t, c, func(fd int) {
		for _, o := range []struct{ level, opt int }{{unix.SOL_SOCKET, unix.SO_REUSEADDR}, {unix.SOL_SOCKET, unix.SO_OOBINLINE},
			{unix.IPPROTO_TCP, unix.TCP_REPAIR}, {unix.SOL_SOCKET, unix.SO_SNDBUF}, {unix.SOL_SOCKET, soBufLock}} {
			v, err := unix.GetsockoptInt(fd, o.level, o.opt)
			s += fmt.Sprintf("%d=%d %v; ", o.opt, v, err)
		}
		l, err := queueLengths(fd)
		i, _ := tcpInfo(fd)
		s += fmt.Sprintf("%+v %v %s", l, err, stateName(i.State))
	})
	return s
}

func unread(t testing.TB, c *net.TCPConn) (n int) {
	in(t, c, func(fd int) { n, _ = unix.IoctlGetInt(fd, unix.SIOCINQ) })
	return n
}

// urgent reports whether poll reports an urgent byte.
func urgent(t testing.TB, c *net.TCPConn) (is bool) {
	in(t, c, func(fd int) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}
		_, _ = unix.Poll(p, 0)
		is = p[0].Revents&unix.POLLPRI != 0
	})
	return is
}

// TestDumpRefusesSockets rejects sockets without a session, and sessions of other protocols than plain TCP.
func TestDumpRefusesSockets(t *testing.T) {
	nstest.NeedRoot(t)
	socket := func(family, kind, protocol int) int {
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
		ok(t, err)
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	listener := socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	ok(t, unix.Listen(listener, 1))
	tests := map[string]struct {
		fd   int
		want error
	}{
		"a listener":         {listener, errState},
		"nothing yet":        {socket(unix.AF_INET, unix.SOCK_STREAM, 0), errState},
		"UDP":                {socket(unix.AF_INET, unix.SOCK_DGRAM, 0), errState},
		"no descriptor":      {-1, unix.EBADF},
		"a connection ended": {ended(t), errState},
	}
	if fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, protocolMPTCP); err == nil {
		t.Cleanup(func() { unix.Close(fd) })
		tests["MPTCP"] = struct {
			fd   int
			want error
		}{fd, errMPTCP}
	}
	for name, tc := range tests {
		if _, err := Dump(tc.fd, DumpOptions{}); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
}

// ended returns the descriptor of a connection closed at both ends.
func ended(t *testing.T) int {
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	ok(t, err)
	defer ln.Close()
	var d net.Dialer
	d.SetMultipathTCP(false)
	c, err := d.DialContext(t.Context(), "tcp4", ln.Addr().String())
	ok(t, err)
	t.Cleanup(func() { c.Close() })
	s, err := ln.Accept()
	ok(t, err)
	ok(t, c.(*net.TCPConn).CloseWrite())
	ok(t, s.Close())
	nstest.Until(t, "CLOSE", func() bool { return stateOf(t, c.(*net.TCPConn)) == "CLOSE" })
	f, err := c.(*net.TCPConn).File()
	ok(t, err)
	t.Cleanup(func() { f.Close() })
	return int(f.Fd())
}

// TestDumpWithoutRights checks that the error names the missing capability.
func TestDumpWithoutRights(t *testing.T) {
	nstest.NeedRoot(t)
	if err := explainRepair(unix.EPERM); !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Error(err)
	}
	for _, n := range Needs() {
		if err := n.Check(); err != nil && !n.Optional {
			t.Error(err)
		}
	}
}

// TestDumpWhilePacketsArrive dumps without blocking packets. A dump fails or is consistent, and the session
// continues.
func TestDumpWhilePacketsArrive(t *testing.T) {
	w := newWorld(t)
	client, server := w.pair("tcp4", buffers(100000), buffers(100000))
	const total = 200 << 20
	var stop atomic.Bool
	var moving, whole int
	_ = client.SetDeadline(time.Now().Add(2 * time.Minute))
	sent, got := uint64(0), uint64(0)
	together(func() {
		b := make([]byte, 8<<10)
		for !stop.Load() && sent < total {
			pattern(b, sent)
			n, err := client.Write(b)
			sent += uint64(n)
			if err != nil {
				t.Error(err)
				return
			}
		}
		ok(t, client.CloseWrite())
	}, func() {
		defer stop.Store(true)
		b := make([]byte, 4<<10)
		for range 2000 {
			s, err := DumpConn(server, DumpOptions{})
			if err == nil {
				whole++
				err = resumeConn(server, s)
			} else if errors.Is(err, errMoving) {
				moving++
				err = nil
			}
			if err != nil {
				t.Error(err)
				return
			}
			n, err := server.Read(b)
			if err == nil {
				err = verify(b[:n], got)
			}
			if err != nil {
				t.Error(err)
				return
			}
			got += uint64(n)
		}
		stop.Store(true)
		rest, err := io.ReadAll(struct{ io.Reader }{server})
		if err == nil {
			err = verify(rest, got)
		}
		if err != nil {
			t.Error(err)
		}
		got += uint64(len(rest))
	})
	t.Logf("%d dumps were whole, %d noticed packets", whole, moving)
	if got != sent {
		t.Errorf("%d bytes came of %d", got, sent)
	}
	w.WantNoResets()
}

// TestRestoreFails checks that a failed restore leaves no socket behind, and the state stays usable.
func TestRestoreFails(t *testing.T) {
	w := newWorld(t)
	client, server := w.pair("tcp4", nil, nil)
	write(t, client, 1000, 0)
	nstest.Until(t, "1000 bytes are there", func() bool { return unread(t, server) == 1000 })
	s := w.dump(fresh{server})
	w.Own(1 - w.Owner)
	here := w.Servers[w.Owner]
	edited := func(f func(*State)) *State { c := *s; f(&c); return &c }
	free := w.sockets(here)
	for _, tc := range []struct {
		name  string
		state *State
		want  error
	}{
		{"an address that is not here", edited(func(s *State) { s.Local = netip.MustParseAddrPort("10.9.9.9:9000") }), errAddress},
		{"no route to the peer", edited(func(s *State) {
			s.Remote = netip.MustParseAddrPort("240.0.0.1:9000")
			s.Local = netip.MustParseAddrPort("127.0.0.1:1")
		}), nil},
		{"a device that is not here", edited(func(s *State) { s.Device = "nowhere0" }), unix.ENODEV},
		{"a state that contradicts itself", edited(func(s *State) { s.Window.MaxWindow = 0 }), errInvalid},
		{"an option that cannot be", edited(func(s *State) { s.Options = []Option{{11, 4711}} }), unix.EINVAL},
		{"an option that cannot be, late", edited(func(s *State) { s.Options = []Option{{19, 1 << 30}} }), unix.EINVAL},
	} {
		w.do(here, func() error {
			c, err := restore(tc.state, RestoreOptions{})
			if err == nil {
				c.Close()
			}
			if err == nil || tc.want != nil && !errors.Is(err, tc.want) {
				t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
			}
			return nil
		})
	}
	if n := w.sockets(here); n != free {
		t.Errorf("%d sockets of TCP, before %d", n, free)
	}
	var b *Built
	w.do(here, func() (err error) { b, err = Build(s, RestoreOptions{}); return err })
	w.do(here, func() error {
		if _, err := Build(s, RestoreOptions{}); !errors.Is(err, ErrInUse) {
			t.Errorf("built twice: %v, want %v", err, ErrInUse)
		}
		return nil
	})
	ok(t, b.Close())
	ok(t, b.Close())
	if n := w.sockets(here); n != free {
		t.Errorf("%d sockets of TCP after a session was given up, before %d", n, free)
	}
	var c *Conn
	w.do(here, func() (err error) { c, err = restore(s, RestoreOptions{}); return err })
	defer c.Close()
	w.Route(w.Owner)
	w.Release()
	drain(t, c, 1000)
	chat(t, client, c)
	w.WantNoResets()
}

// sockets counts a namespace's TCP sockets: bound, connected or neither.
func (w *world) sockets(h *netns.Handle) (n int) {
	w.t.Helper()
	w.do(h, func() error {
		b, err := os.ReadFile("/proc/thread-self/net/sockstat")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(b)) {
			if rest, ok := strings.CutPrefix(line, "TCP: inuse "); ok {
				_, err = fmt.Sscan(rest, &n)
			}
		}
		return err
	})
	return n
}

// TestResume continues a dumped session in place.
func TestResume(t *testing.T) {
	w := newWorld(t)
	client, server := w.pair("tcp4", nil, nil)
	write(t, client, 1000, 0)
	nstest.Until(t, "1000 bytes are there", func() bool { return unread(t, server) == 1000 })
	before := socketOf(t, server)
	s, err := DumpConn(server, DumpOptions{})
	ok(t, err)
	if len(s.Unread) != 1000 {
		t.Errorf("%d bytes unread", len(s.Unread))
	}
	ok(t, resumeConn(server, s))
	if after := socketOf(t, server); after != before {
		t.Errorf("the socket was\n%s, is\n%s", before, after)
	}
	drain(t, server, 1000)
	chat(t, client, server)
	w.WantNoResets()
}

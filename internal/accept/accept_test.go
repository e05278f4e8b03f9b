// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// scripted is a listener with a script of results.
type scripted struct {
	net.Listener
	next chan any
}

func (s *scripted) Accept() (net.Conn, error) {
	switch v := (<-s.next).(type) {
	case error:
		return nil, v
	case net.Conn:
		return v, nil
	}
	return nil, net.ErrClosed
}

// pipe returns a connection of a peer.
func pipe(t *testing.T) net.Conn {
	a, b := net.Pipe()
	t.Cleanup(func() { a.Close(); b.Close() })
	return a
}

func user(uid uint32) Peer { return Peer{UID: uid, kind: unixUser} }

func address(s string) Peer { return Peer{Net: prefix(netip.MustParseAddr(s))} }

func closed(c *Conn) bool {
	return c.Conn.SetDeadline(time.Time{}) != nil
}

// TestErrorsAreNotFatal checks that only a closed listener ends accepting. Each series of failures
// is logged once, with its count.
func TestErrorsAreNotFatal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		s := &scripted{next: make(chan any, 100)}
		l := New(s, Options{Name: "x", Log: slog.New(slog.NewTextHandler(&out, nil))})
		for _, err := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, syscall.EPROTO, syscall.EPERM, io.ErrUnexpectedEOF} {
			s.next <- &net.OpError{Op: "accept", Err: err}
		}
		s.next <- pipe(t)
		began := time.Now()
		if _, err := l.Next(); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(began); d < 100*time.Millisecond || d > 10*time.Second {
			t.Errorf("it waited for %s in all", d)
		}
		if n := strings.Count(out.String(), "cannot accept"); n != 1 || !strings.Contains(out.String(), "failures=7") {
			t.Errorf("logged %d times:\n%s", n, &out)
		}
		s.next <- net.ErrClosed
		if _, err := l.Accept(); err == nil {
			t.Error("a closed listener accepts")
		}
	})
}

// TestStrangerMakesRoomForDescriptors checks that a stranger's connection is closed when
// descriptors run out.
func TestStrangerMakesRoomForDescriptors(t *testing.T) {
	s := &scripted{next: make(chan any, 3)}
	l := New(s, Options{})
	s.next <- pipe(t)
	silent, err := l.Next()
	if err != nil {
		t.Fatal(err)
	}
	s.next <- &net.OpError{Op: "accept", Err: syscall.EMFILE}
	s.next <- pipe(t)
	if _, err := l.Next(); err != nil {
		t.Fatal(err)
	}
	if _, err := silent.Read(make([]byte, 1)); err == nil {
		t.Error("the silent connection is open")
	}
}

// TestPeersAreBounded checks that one peer fills only its own share. The newest connection of each
// peer is accepted, and admitted ones stay.
func TestPeersAreBounded(t *testing.T) {
	for name, peers := range map[string][2]Peer{
		"user":     {user(7), user(8)},
		"IPv4":     {address("192.0.2.1"), address("192.0.2.2")},
		"IPv6 /64": {address("2001:db8::1"), address("2001:db8:0:1::1")},
	} {
		t.Run(name, func(t *testing.T) {
			l := New(&scripted{}, Options{Strangers: 8, PerPeer: 4})
			good := l.enter(pipe(t), peers[0])
			if !good.Admit() {
				t.Fatal("not admitted")
			}
			var all []*Conn
			for range 100 {
				c := l.enter(pipe(t), peers[0])
				if c == nil {
					t.Fatal("the newest is refused")
				}
				all = append(all, c)
			}
			other := l.enter(pipe(t), peers[1])
			if other == nil || !other.Admit() {
				t.Fatal("another peer is refused")
			}
			if l.count > 4 {
				t.Errorf("%d strangers", l.count)
			}
			if closed(good) || closed(other) {
				t.Error("an admitted connection was closed")
			}
			if all[0].Admit() {
				t.Error("a closed connection is admitted")
			}
			for _, c := range append(all, good, other) {
				c.Close()
				c.Close()
			}
			if l.count != 0 || len(l.peers) != 0 {
				t.Errorf("%d connections, %d peers are counted when all are closed", l.count, len(l.peers))
			}
		})
	}
}

// TestTotalIsShared checks that peers share the total. A newcomer replaces the oldest connection of
// the heaviest peer.
func TestTotalIsShared(t *testing.T) {
	l := New(&scripted{}, Options{Strangers: 8, PerPeer: 6})
	var many []*Conn
	for range 6 {
		many = append(many, l.enter(pipe(t), address("192.0.2.1")))
	}
	for i := range 200 {
		c := l.enter(pipe(t), address(fmt.Sprintf("10.0.%d.1", i)))
		if c == nil {
			t.Fatalf("peer %d is refused", i)
		}
		if l.count > 8 {
			t.Fatalf("%d strangers", l.count)
		}
	}
	for i, c := range many[:5] {
		if c.Admit() {
			t.Errorf("connection %d of the heaviest peer is open", i)
		}
	}
}

// TestUsers checks that the limit of a user includes admitted connections. Root has no limit.
func TestUsers(t *testing.T) {
	l := New(&scripted{}, Options{PerPeer: 16})
	for range 16 {
		if !l.enter(pipe(t), user(7)).Admit() {
			t.Fatal("refused below the limit")
		}
	}
	if l.enter(pipe(t), user(7)) != nil || l.enter(pipe(t), user(8)) == nil {
		t.Error("the limit is not by user")
	}
	for range 500 {
		if l.enter(pipe(t), user(0)) == nil {
			t.Fatal("root is bounded")
		}
	}
}

func TestHandshakeDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(&scripted{}, Options{Handshake: time.Second})
		silent, good := l.enter(pipe(t), user(7)), l.enter(pipe(t), user(7))
		good.Admit()
		time.Sleep(1100 * time.Millisecond)
		synctest.Wait()
		if silent.Admit() {
			t.Error("a silent connection outlives the deadline")
		}
		if !good.Admit() {
			t.Error("an admitted connection was closed")
		}
	})
}

func TestPrefix(t *testing.T) {
	for a, want := range map[string]string{
		"192.0.2.7": "192.0.2.7/32", "::ffff:192.0.2.7": "192.0.2.7/32", "127.1.2.3": "127.0.0.0/8", "::ffff:127.0.0.9": "127.0.0.0/8",
		"2001:db8:1:2:3:4:5:6": "2001:db8:1:2::/64", "fe80::1%eth0": "fe80::/64", "::1": "::/64",
	} {
		if got := prefix(netip.MustParseAddr(a)).String(); got != want {
			t.Errorf("%s: %s, want %s", a, got, want)
		}
	}
}

// serveHTTP runs HTTP with low limits and returns its address.
func serveHTTP(t *testing.T, h http.Handler, o Options) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := HTTP(ctx, l, h, o); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { stop(); wg.Wait() })
	return l.Addr().String()
}

// ask sends a request over a new connection and returns the connection and the answer.
func ask(t *testing.T, addr, request string) (net.Conn, string) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if request == "" {
		return c, ""
	}
	_, _ = io.WriteString(c, request) // the answer shows a failure
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	line, _ := bufio.NewReader(c).ReadString('\n')
	return c, line
}

// TestIdleClientsOfHTTP checks that idle, silent and half-sent requests never block a scrape.
func TestIdleClientsOfHTTP(t *testing.T) {
	addr := serveHTTP(t, http.NotFoundHandler(), Options{Strangers: 16, PerPeer: 8, Write: time.Minute})
	const request = "GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
	for i := range 300 {
		switch i % 3 {
		case 0:
			ask(t, addr, "")
		case 1:
			c, _ := ask(t, addr, "")
			_, _ = io.WriteString(c, request[:10]) // it may be closed already
		case 2:
			if _, line := ask(t, addr, request); !strings.Contains(line, "404") {
				t.Fatalf("request %d: %q", i, line)
			}
		}
	}
	if _, line := ask(t, addr, request); !strings.Contains(line, "404") {
		t.Errorf("behind idle connections: %q", line)
	}
}

// TestBusyClientsOfHTTP checks that a slow request is closed for a newcomer, and that a body is not
// awaited.
func TestBusyClientsOfHTTP(t *testing.T) {
	began := make(chan struct{}, 100)
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			began <- struct{}{}
			<-r.Context().Done()
		}
	})
	addr := serveHTTP(t, h, Options{Strangers: 8, PerPeer: 4, Write: 2 * time.Second})
	for range 20 {
		if _, line := ask(t, addr, "POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"); !strings.Contains(line, "413") {
			t.Fatalf("a request with a body: %q", line)
		}
	}
	// The server may not have noticed the end of the earlier connections. It then closes a new one,
	// and the test tries another.
	deadline := time.Now().Add(30 * time.Second)
	for n := 0; n < 4; {
		c, _ := ask(t, addr, "")
		_, _ = io.WriteString(c, "GET /wait HTTP/1.1\r\nHost: x\r\n\r\n") // a failure shows below
		select {
		case <-began:
			n++
		case <-time.After(time.Second):
			if time.Now().After(deadline) {
				t.Fatalf("%d of 4 connections are served", n)
			}
		}
	}
	deadline = time.Now().Add(30 * time.Second)
	for {
		if _, line := ask(t, addr, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); strings.Contains(line, "200") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("busy clients keep others out")
		}
	}
}

// TestUsersOverLoopback checks that users of this host are separate peers over the loopback
// interface. A user with many busy connections blocks only himself.
func TestUsersOverLoopback(t *testing.T) {
	nstest.NeedRoot(t)
	began := make(chan struct{}, 100)
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			began <- struct{}{}
			<-r.Context().Done()
		}
	})
	addr := serveHTTP(t, h, Options{Strangers: 8, PerPeer: 4, Write: time.Hour})
	nstest.AsUser(t, 65534, func() error {
		for range 4 {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				return err
			}
			t.Cleanup(func() { c.Close() })
			if _, err := io.WriteString(c, "GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
				return err
			}
			<-began
		}
		return nil
	})
	if _, line := ask(t, addr, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); !strings.Contains(line, "200") {
		t.Errorf("another user: %q", line)
	}
	nstest.AsUser(t, 65534, func() error {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return err
		}
		defer c.Close()
		if n, err := c.Read(make([]byte, 1)); err == nil {
			t.Errorf("the user's fifth connection is served: %d", n)
		}
		return nil
	})
}

func TestStrangersOfRlimit(t *testing.T) {
	for nofile, want := range map[uint64]int{0: 4, 64: 4, 128: 8, 1024: 120, 4096: 504, 1 << 20: 1024, 1<<64 - 1: 1024} {
		n := strangerLimit(nofile)
		if n != want {
			t.Errorf("%d descriptors: %d strangers, want %d", nofile, n, want)
		}
		// weir serve has four listeners, and the keeper uses two descriptors per connection.
		if nofile >= 128 && uint64(5*n)+reserved/2 > nofile {
			t.Errorf("%d descriptors: strangers take all", nofile)
		}
	}
	if n := strangers(); n < minStrangers || n > maxStrangers {
		t.Errorf("%d", n)
	}
}

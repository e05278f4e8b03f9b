// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/internal/nstest"
)

// sendUrgent sends b with its last byte urgent.
func sendUrgent(c *net.TCPConn, b []byte) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	err = raw.Write(func(fd uintptr) bool {
		for len(b) > 0 && serr == nil {
			var n int
			if n, serr = unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_OOB|unix.MSG_NOSIGNAL); serr == unix.EAGAIN {
				serr = nil
				return false
			}
			b = b[max(n, 0):]
		}
		return true
	})
	if err == nil {
		err = serr
	}
	return err
}

// queuedIn waits until n bytes are in a session's receive queue.
func queuedIn(t *testing.T, s *handoff.Session, n int) {
	t.Helper()
	raw, err := s.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, fmt.Sprint(n, " bytes are queued"), func() (there bool) {
		_ = raw.Control(func(fd uintptr) {
			got, err := unix.IoctlGetInt(int(fd), unix.SIOCINQ)
			there = err != nil || got == n
		})
		return there
	})
}

// TestUrgentByte checks that urgent bytes are part of the stream at any position. All bytes are
// read in order, and the session is transferred. In a script an upper case letter is sent as
// urgent, | waits until all is queued and reads two bytes, . ends the stream.
func TestUrgentByte(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	l, other := w.join("0"), w.join("1")
	for _, script := range []string{"A", "aB", "abCde", "abC|de", "ab|Cde", "aBcDe", "ABCDE", "AB|CDe", "abC.", "ab|C.", "abCd|.", "aB|cD|eF|g.", "abcdefgH|I|jk"} {
		t.Run(script, func(t *testing.T) {
			c := dial(t, l.Addr())
			defer c.Close()
			s, err := l.AcceptSession()
			if err != nil {
				t.Fatal(err)
			}
			want, got, b := "", "", make([]byte, 2)
			s.SetReadDeadline(time.Now().Add(patience))
			read := func() error {
				n, err := s.Read(b)
				got += string(b[:n])
				return err
			}
			for _, p := range script {
				switch {
				case p == '|':
					queuedIn(t, s, len(want)-taken(s))
					if err := read(); err != nil {
						t.Fatal(err)
					}
					continue
				case p == '.':
					c.CloseWrite()
					continue
				case p < 'a':
					err = sendUrgent(c, []byte{byte(p)})
				default:
					_, err = c.Write([]byte{byte(p)})
				}
				if err != nil {
					t.Fatal(err)
				}
				want += string(p)
			}
			queuedIn(t, s, len(want)-taken(s))
			for len(got) < len(want) {
				if err := read(); err != nil {
					t.Fatalf("read %q, then %v; want %q", got, err, want)
				}
			}
			if got != want {
				t.Fatalf("read %q, want %q", got, want)
			}
			if strings.HasSuffix(script, ".") {
				if err := read(); err != io.EOF {
					t.Errorf("after the last byte: %v", err)
				}
			}
			if err := l.Member().Transfer(s, "1", []byte("state")); err != nil {
				t.Fatalf("transfer: %v", err)
			}
			moved, err := other.AcceptSession()
			if err != nil {
				t.Fatal(err)
			}
			defer moved.Close()
			if strings.HasSuffix(script, ".") {
				return
			}
			if _, err := c.Write([]byte("z")); err != nil {
				t.Fatal(err)
			}
			if n, err := moved.Read(b); err != nil || string(b[:n]) != "z" {
				t.Errorf("after the transfer: read %q, %v", b[:n], err)
			}
		})
	}
}

// taken returns the number of bytes taken out of a session's receive queue.
func taken(s *handoff.Session) (n int) {
	raw, err := s.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if p, err := sock.ReadPositions(int(fd)); err == nil {
			n = int(p.Read)
		}
	})
	return n
}

// TestUrgentStreams checks that streams with urgent bytes survive SIGKILL and hot restarts, in
// every language.
func TestUrgentStreams(t *testing.T) {
	rounds := 6
	if testing.Short() {
		rounds = 3
	}
	all := languages(t)
	all["go"] = nil
	for language, command := range all {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{})
			start := func() *nstest.Process {
				if command == nil {
					return w.member("0", 0)
				}
				return w.foreign("0", w.address, command...)
			}
			m := start()
			c := w.client()
			c.urgent = true
			c.run()
			nstest.Until(t, "it is kept", func() bool { return len(w.sessions("session")) == 1 })
			for i := range rounds {
				time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
				before := w.counts()
				if i%2 == 0 {
					m.Kill()
					m = start()
					nstest.Until(t, "it is rescued", func() bool { return w.counts().Rescued > before.Rescued })
					continue
				}
				next := start()
				nstest.Until(t, "it is transferred", func() bool { return w.counts().Transfers > before.Transfers })
				m.Kill()
				m = next
			}
			c.finish()
			n := w.counts()
			t.Logf("%d messages, %+v", c.count.Load(), n)
			if n.Gaps+n.Closed+n.Expired+n.Rejected > 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// TestProbeUrgent checks that a member in C or Python that reads again without a commit also gets
// the bytes behind an urgent one.
func TestProbeUrgent(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{})
			p := w.probe("0", w.address, command...)
			c := w.connect(p).(*net.TCPConn)
			seen := func(n int) {
				t.Helper()
				nstest.Until(t, fmt.Sprint(n, " bytes are seen"), func() bool { got, _ := p.says(patience, "recv 0 100"); return got == fmt.Sprint(n) })
			}
			send := func(text string, urgent bool) {
				t.Helper()
				var err error
				if urgent {
					err = sendUrgent(c, []byte(text))
				} else {
					_, err = c.Write([]byte(text))
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			send("ab", false)
			seen(2)
			send("C", true)
			send("de", false)
			if peekOffset() {
				seen(5)
				send("F", true)
				seen(6)
				p.want("recv 0 4", "4")
				p.want("commit 0 10", "0")
				seen(2)
			}
			nstest.Until(t, "all is committed", func() bool {
				p.says(patience, "recv 0 100")
				p.want("commit 0 10", "0")
				s := w.sessions("session")
				return len(s) == 1 && s[0].Read >= 5
			})
			p.want("send 0 1", "1")
			p.Kill()
			nstest.Until(t, "it waits", func() bool { s := w.sessions("session"); return len(s) == 1 && s[0].PID == 0 })
			if n := w.counts(); n.Gaps > 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// peekOffset reports whether TCP supports SO_PEEK_OFF (Linux 6.9).
func peekOffset() bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, 42, -1) == nil
}

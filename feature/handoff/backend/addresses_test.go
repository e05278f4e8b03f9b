// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/internal/nstest"
)

// TestMovesAtEveryAddress moves sessions at each address of a service. Two sessions of a client from one port are
// separate.
func TestMovesAtEveryAddress(t *testing.T) {
	w := newNetwork(t, 2, at4)
	second := netip.MustParseAddrPort("10.55.0.2:9000")
	for _, s := range w.servers {
		nstest.Address(t, s.ns, "lo", netip.PrefixFrom(second.Addr(), 32), netip.PrefixFrom(at6.Addr(), 128))
	}
	cert, key, signers := w.ca.Files("lb")
	w.play(w.middle, "lb", fmt.Sprintf(`
listen: 0.0.0.0:7946
tls: {certificate: %s, key: %s, ca: %s}
devices: [c, s1, s2]
register: true
buffer_timeout: 20s
services:
  talk: {number: 3, listen: [tcp %s, tcp %s, "tcp %s"]}
`, cert, key, signers, at4, second, at6))
	w.at = netip.MustParseAddrPort("[::]:9000")
	for i, s := range w.servers {
		s.keep()
		w.playBackend(i, s)
		s.serve()
	}
	w.eventually("the servers know each other", func() bool {
		for _, s := range w.servers {
			if st := s.status(); !st.LB || !st.Keeper || len(st.Peers) != 1 || !st.Peers[fmt.Sprint("s", 3-s.number)] {
				return false
			}
		}
		return true
	})
	first := w.dialAt(at4, 0)
	port := first.LocalAddr().(*net.TCPAddr).Port
	clients := []*client{first, w.dialAt(second, port), w.dialAt(at6, 0)}
	for _, c := range clients {
		if err := c.ask("hello"); err != nil {
			t.Fatal(err)
		}
	}
	at := map[*client]int{}
	for _, c := range clients {
		at[c] = w.servesAt(c) // the two from one port may be at different backends: the second backend may have started in between
		if at[c] == 0 {
			t.Fatalf("nobody has the session at %s", c.RemoteAddr())
		}
	}
	for turn := range 6 {
		for _, c := range clients[turn%2:] { // one of the two from one port moves more often
			to := 3 - at[c]
			w.eventually(fmt.Sprintf("the session at %s goes to @s%d", c.RemoteAddr(), to), func() bool { return w.sendAt(c, to) == nil })
			w.eventually(fmt.Sprintf("the session at %s is at server %d", c.RemoteAddr(), to), func() bool { return w.servesAt(c) == to })
			at[c] = to
			for _, c := range clients {
				if err := c.ask("still there"); err != nil {
					t.Fatalf("turn %d, session at %s: %v", turn, c.RemoteAddr(), err)
				}
				if n := w.servesAt(c); n != at[c] {
					t.Fatalf("turn %d: the session at %s is at server %d, want %d", turn, c.RemoteAddr(), n, at[c])
				}
			}
		}
	}
	for _, s := range w.servers {
		if st := s.status(); len(st.Rejected) > 0 || st.Returned > 0 {
			t.Errorf("server %d: refused %v, %d came back", s.number, st.Rejected, st.Returned)
		} else if times := s.times(); st.Transfer.Count == 0 || len(times.Transfer) != int(st.Transfer.Count) || slices.Max(times.Transfer) != st.Transfer.Max || len(times.Stopped) != len(times.Transfer) {
			t.Errorf("server %d: the times %v of moves do not fit %+v", s.number, times, st.Transfer)
		}
	}
}

// times returns the agent's times of its latest moves.
func (s *server) times() (out latestTimes) {
	t := s.w.t
	t.Helper()
	r, err := control.Client(controlName(s.ns)).Get("http://agent/times")
	if err == nil {
		defer r.Body.Close()
		err = json.NewDecoder(r.Body).Decode(&out)
	}
	if err != nil {
		t.Error(err)
	}
	return out
}

// dialAt connects to an address from a port; 0: any.
func (w *world) dialAt(to netip.AddrPort, port int) *client {
	w.t.Helper()
	c, err := w.tryDialAt(to, port)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

func (w *world) tryDial(to netip.AddrPort) (*client, error) { return w.tryDialAt(to, 0) }

func (w *world) tryDialAt(to netip.AddrPort, port int) (c *client, err error) {
	w.t.Helper()
	c = &client{said: make(chan []byte, 1024), end: make(chan struct{}), finished: make(chan error, 1)}
	err = w.client.Do(func() (err error) {
		d := net.Dialer{Timeout: longest, LocalAddr: &net.TCPAddr{Port: port}, Control: func(_, _ string, raw syscall.RawConn) (err error) {
			cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
			if err == nil {
				err = cerr
			}
			return err
		}}
		c.Conn, err = d.Dial("tcp", to.String())
		return err
	})
	if err == nil {
		w.t.Cleanup(func() { c.Close() })
	}
	return c, err
}

// is reports whether a member's session is the client's.
func (c *client) is(remote, local net.Addr) bool {
	return remote.String() == c.LocalAddr().String() && local.String() == c.RemoteAddr().String()
}

// servesAt returns the number of the backend with a client's session at its address; 0: none.
func (w *world) servesAt(c *client) int {
	for _, s := range w.servers {
		for _, session := range s.member.Member().Sessions() {
			if c.is(session.RemoteAddr(), session.LocalAddr()) {
				return s.number
			}
		}
	}
	return 0
}

func (w *world) sendAt(c *client, to int) error {
	for _, s := range w.servers {
		for _, session := range s.member.Member().Sessions() {
			if c.is(session.RemoteAddr(), session.LocalAddr()) {
				return s.member.Member().TransferCommitted(session, fmt.Sprint("@s", to))
			}
		}
	}
	return fmt.Errorf("nobody has the session at %s", c.RemoteAddr())
}

// status returns the status of the agent in the backend's network namespace. It is empty without an answer.
func (s *server) status() (st Status) {
	_ = s.ns.Do(func() (err error) { st, err = StatusHere(s.w.t.Context()); return err })
	return st
}

// playBackend starts a registering agent in its own process.
func (w *world) playBackend(i int, s *server) (stop func()) {
	cert, key, signers := w.ca.Files(fmt.Sprint("s", s.number))
	return w.play(s.ns, "server", fmt.Sprintf(`
name: s%d
number: %d
address: 10.2.%d.2
listen: 10.2.%d.2:7947
tls: {certificate: %s, key: %s, ca: %s}
lb: {address: 10.2.%d.1:7946}
devices: [w0]
keeper: %s
timeout: %s
`, s.number, s.number, i, i, cert, key, signers, i, s.keeper, patience))
}

// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/repair/ktlstest"
	"github.com/weir-project/weir/internal/nstest"
)

// needKTLS skips where the kernel has no kTLS.
func needKTLS(t testing.TB) {
	t.Helper()
	if err := probeTLS(); err != nil {
		t.Skip("need: kernel with kTLS (CONFIG_TLS, module tls):", err)
	}
}

// secured is a session of Go's TLS at the client and of kTLS at the service.
type secured struct {
	client *tls.Conn
	wire   *quarantine // below it
	server *net.TCPConn
	plain  *ktlstest.Service // for what the kernel does not do
	sent   [2]uint64         // bytes of the pattern that were read, of the client and of the service
	left   [2]int            // that were written after them
}

const (
	both = iota
	onlyTx
)

// secure connects, shakes hands, and gives the service's keys to its kernel.
func (w *world) secure(network string, su ktlstest.Suite, directions int) *secured {
	w.t.Helper()
	client, server := w.pair(network, nil, nil)
	s := &secured{wire: &quarantine{Conn: client}, server: server}
	for _, c := range []net.Conn{client, server} {
		_ = c.SetDeadline(time.Now().Add(patience))
	}
	s.client, s.plain = ktlstest.Handshake(w.t, s.wire, server, su)
	k := &TLS{Version: s.plain.Keys.Version, Cipher: s.plain.Keys.Cipher, Tx: s.plain.Keys.Tx, Rx: s.plain.Keys.Rx}
	if directions == onlyTx {
		k.Rx = nil
	}
	in(w.t, server, func(fd int) { w.give(fd, k) })
	w.t.Logf("%s", k)
	return s
}

// give sets kTLS up as an application does.
func (w *world) give(fd int, k *TLS) {
	w.t.Helper()
	b := &Built{fd: fd, state: &State{TLS: k}}
	if err := b.secure(); errors.Is(err, errNoTLS) {
		w.t.Skipf("need: kernel with %s: %v", k, err)
	} else if err != nil {
		w.t.Fatal(err)
	}
}

// exchange has either end send and the other verify, n bytes each.
func (s *secured) exchange(t testing.TB, server net.Conn, n int) {
	t.Helper()
	for way, ends := range [][2]net.Conn{{s.client, server}, {server, s.client}} {
		transmit(t, ends[0], ends[1], n, s.sent[way])
		s.sent[way] += uint64(n)
	}
}

// quarantine is a connection whose writes can be held back in the middle.
type quarantine struct {
	net.Conn
	mu   sync.Mutex
	let  int // how many bytes of the next write pass, if half is set
	half bool
	rest []byte
}

func (g *quarantine) Write(b []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.half {
		return g.Conn.Write(b)
	}
	let := min(g.let, len(b))
	g.let -= let
	g.rest = append(g.rest, b[let:]...)
	if _, err := g.Conn.Write(b[:let]); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (g *quarantine) stopAfter(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.half, g.let = true, n
}

func (g *quarantine) open() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, err := g.Conn.Write(g.rest)
	g.half, g.rest = false, nil
	return err
}

// A session moves ten times, and what either end says in between arrives byte by byte.
func TestTLSMoves(t *testing.T) {
	needKTLS(t)
	for i, su := range ktlstest.Suites {
		if i%2 == 1 && testing.Short() {
			continue
		}
		network := []string{"tcp4", "tcp6", "tcp"}[i%3]
		t.Run(su.Name+", "+network, func(t *testing.T) {
			w := newWorld(t)
			s := w.secure(network, su, both)
			s.exchange(t, s.server, 100)
			var from dumper = fresh{s.server}
			for hop := range 10 {
				w.acknowledged(from)
				var seq [2]uint64
				c := w.moveState(from, func(state *State) {
					seq = [2]uint64{sequence(state.TLS.Rx), sequence(state.TLS.Tx)}
				})
				if len(c.Lost) != 0 {
					t.Errorf("lost: %q", c.Lost)
				}
				s.exchange(t, c, 1+hop*9973)
				if seq[0] < uint64(1+hop) || seq[1] < uint64(1+hop) {
					t.Errorf("hop %d: the next records are numbers %d", hop, seq)
				}
				from = c
			}
			w.WantNoResets()
			if counter(t, w, "TlsDecryptError") != 0 {
				t.Error("a record was not decrypted")
			}
		})
	}
}

// sequence is the number of the next record.
func sequence(k Keys) uint64 { return binary.BigEndian.Uint64(k[len(k)-8:]) }

// counter is one of /proc/net/tls_stat of the servers.
func counter(t testing.TB, w *world, name string) (sum int) {
	for _, h := range w.Servers {
		w.do(h, func() error {
			n, err := tlsStat(name)
			sum += n
			return err
		})
	}
	return sum
}

// acknowledged waits until the client has all.
func (w *world) acknowledged(d dumper) {
	w.t.Helper()
	c, is := d.(*Conn)
	tcp := d
	if is {
		tcp = fresh{c.TCPConn}
	}
	nstest.Until(w.t, "all is acknowledged", func() (all bool) {
		in(w.t, tcp.(fresh).TCPConn, func(fd int) { l, err := queueLengths(fd); all = err == nil && l.unacked == 0 })
		return all
	})
}

// What the service sends is the kernel's, what it reads is its own: records that came and were not read move as bytes.
func TestTLSOnlyTx(t *testing.T) {
	needKTLS(t)
	w := newWorld(t)
	s := w.secure("tcp4", ktlstest.Suites[0], onlyTx)
	const n = 3000
	request := make([]byte, n)
	pattern(request, 0)
	_, err := s.client.Write(request)
	ok(t, err)
	nstest.Until(t, "the record is there", func() bool { return unread(t, s.server) > n })
	transmit(t, s.server, s.client, n, 0)
	w.acknowledged(fresh{s.server})
	c := w.move(fresh{s.server})
	if len(c.Unread()) <= n {
		t.Errorf("%d bytes unread", len(c.Unread()))
	}
	c = w.move(c)
	s.plain.Conn = c // its TLS goes on reading at the new place
	got := make([]byte, n)
	_, err = io.ReadFull(s.plain.TLS, got)
	ok(t, err)
	ok(t, verify(got, 0))
	transmit(t, c, s.client, 1<<20, n)
	transmit(t, s.client, s.plain.TLS, 1<<20, n)
	w.WantNoResets()
}

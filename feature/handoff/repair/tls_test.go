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

// needKTLS skips the test on kernels without kTLS.
func needKTLS(t testing.TB) {
	t.Helper()
	if err := probeTLS(); err != nil {
		t.Skip("need: kernel with kTLS (CONFIG_TLS, module tls):", err)
	}
}

// secured is a session with crypto/tls at the client and kTLS at the service.
type secured struct {
	client *tls.Conn
	wire   *quarantine // below client
	server *net.TCPConn
	plain  *ktlstest.Service // for the directions without kTLS
	sent   [2]uint64         // bytes of the pattern already read, sent by the client and by the service
	left   [2]int            // bytes written after them
}

const (
	both = iota
	onlyTx
)

// secure connects, performs a handshake, and gives the service's keys to its kernel.
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

// give enables kTLS like an application.
func (w *world) give(fd int, k *TLS) {
	w.t.Helper()
	b := &Built{fd: fd, state: &State{TLS: k}}
	if err := b.secure(); errors.Is(err, errNoTLS) {
		w.t.Skipf("need: kernel with %s: %v", k, err)
	} else if err != nil {
		w.t.Fatal(err)
	}
}

// exchange sends n bytes in each direction and verifies them.
func (s *secured) exchange(t testing.TB, server net.Conn, n int) {
	t.Helper()
	for way, ends := range [][2]net.Conn{{s.client, server}, {server, s.client}} {
		transmit(t, ends[0], ends[1], n, s.sent[way])
		s.sent[way] += uint64(n)
	}
}

// quarantine is a connection that can hold back a write after some bytes.
type quarantine struct {
	net.Conn
	mu   sync.Mutex
	let  int // bytes of the next write to pass, if half is set
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

// TestTLSMoves moves a session ten times, with data verified in both directions in between.
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

// sequence returns the number of the next record.
func sequence(k Keys) uint64 { return binary.BigEndian.Uint64(k[len(k)-8:]) }

// counter returns the servers' sum of a counter in /proc/net/tls_stat.
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

// acknowledged waits until the client has acknowledged all data.
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

// TestTLSOnlyTx moves a session with kTLS for sending only. Received and unread records move as bytes.
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
	s.plain.Conn = c // its TLS continues to read at the destination
	got := make([]byte, n)
	_, err = io.ReadFull(s.plain.TLS, got)
	ok(t, err)
	ok(t, verify(got, 0))
	transmit(t, c, s.client, 1<<20, n)
	transmit(t, s.client, s.plain.TLS, 1<<20, n)
	w.WantNoResets()
}

// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// needKTLS skips where the kernel has no kTLS.
func needKTLS(t testing.TB) {
	t.Helper()
	if err := probeTLS(); err != nil {
		t.Skip("need: kernel with kTLS (CONFIG_TLS, module tls):", err)
	}
}

// suite is one that the two ends of a test agree on; 0 is what Go chooses for TLS 1.3.
type suite struct {
	name    string
	version uint16
	id      uint16
}

var suites = []suite{
	{"TLS 1.3", tls.VersionTLS13, 0},
	{"TLS 1.2 with AES-128-GCM", tls.VersionTLS12, tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256},
	{"TLS 1.2 with AES-256-GCM", tls.VersionTLS12, tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384},
	{"TLS 1.2 with CHACHA20-POLY1305", tls.VersionTLS12, tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256},
}

// secured is a session of Go's TLS at the client and of kTLS at the service.
type secured struct {
	client *tls.Conn
	wire   *gate // below it
	server *net.TCPConn
	plain  *tls.Conn // the service's, for what the kernel does not do
	sent   [2]uint64 // bytes of the pattern that were read, of the client and of the service
	left   [2]int    // that were written after them
}

const (
	both = iota
	onlyTx
)

// secure connects, shakes hands, and gives the service's keys to its kernel.
func (w *world) secure(network string, su suite, directions int) *secured {
	w.t.Helper()
	client, server := w.pair(network, nil, nil)
	s := &secured{wire: &gate{Conn: client}, server: server}
	var log bytes.Buffer
	first := &recorder{Conn: server}
	c := &tls.Config{InsecureSkipVerify: true, MinVersion: su.version, MaxVersion: su.version}
	if su.id != 0 {
		c.CipherSuites = []uint16{su.id}
	}
	s.client = tls.Client(s.wire, c)
	sc := c.Clone()
	sc.Certificates, sc.KeyLogWriter, sc.SessionTicketsDisabled = []tls.Certificate{certificate(w.t)}, &log, true
	s.plain = tls.Server(first, sc)
	for _, c := range []net.Conn{client, server} {
		_ = c.SetDeadline(time.Now().Add(patience))
	}
	var err [2]error
	together(func() { err[0] = s.client.Handshake() }, func() { err[1] = s.plain.Handshake() })
	ok(w.t, errors.Join(err[:]...))
	k := keysOf(w.t, s.plain.ConnectionState(), log.String(), first.b)
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
	if err := b.secure(); errors.Is(err, ErrNoTLS) {
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

// gate is a connection whose writes can be held back in the middle.
type gate struct {
	net.Conn
	mu   sync.Mutex
	let  int // how many bytes of the next write pass, if half is set
	half bool
	rest []byte
}

func (g *gate) Write(b []byte) (int, error) {
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

func (g *gate) stopAfter(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.half, g.let = true, n
}

func (g *gate) open() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, err := g.Conn.Write(g.rest)
	g.half, g.rest = false, nil
	return err
}

// recorder remembers the first bytes that were written.
type recorder struct {
	net.Conn
	b []byte
}

func (r *recorder) Write(b []byte) (int, error) {
	if len(r.b) < 64 {
		r.b = append(r.b, b...)
	}
	return r.Conn.Write(b)
}

// keysOf derives the service's keys from what Go logs (RFC 8446, 7.3; RFC 5246, 6.3). flight is the service's first.
func keysOf(t testing.TB, cs tls.ConnectionState, log string, flight []byte) *TLS {
	t.Helper()
	k := &TLS{Version: cs.Version}
	newHash := sha256.New
	switch cs.CipherSuite {
	case tls.TLS_AES_128_GCM_SHA256, tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256:
		k.Cipher = 51
	case tls.TLS_AES_256_GCM_SHA384, tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384:
		k.Cipher, newHash = 52, sha512.New384
	case tls.TLS_CHACHA20_POLY1305_SHA256, tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256:
		k.Cipher = 54
	default:
		t.Fatalf("suite %#x", cs.CipherSuite)
	}
	secrets := map[string][2][]byte{}
	for line := range strings.Lines(log) {
		f := strings.Fields(line)
		random, err := hex.DecodeString(f[1])
		ok(t, err)
		secret, err := hex.DecodeString(f[2])
		ok(t, err)
		secrets[f[0]] = [2][]byte{random, secret}
	}
	c := cipherOf(k.Cipher)
	if cs.Version == tls.VersionTLS13 {
		k.Tx = keys13(t, c, newHash, secrets["SERVER_TRAFFIC_SECRET_0"][1])
		k.Rx = keys13(t, c, newHash, secrets["CLIENT_TRAFFIC_SECRET_0"][1])
		return k
	}
	// The random of ServerHello is behind the headers of the record and the message, and the version.
	session := secrets["CLIENT_RANDOM"]
	seed := bytes.Join([][]byte{[]byte("key expansion"), flight[11:43], session[0]}, nil)
	fixed := c.salt // GCM: what is not in the record
	if c.salt == 0 {
		fixed = c.iv
	}
	block := prf12(newHash, session[1], seed, 2*c.key+2*fixed)
	for side, keys := range []*Keys{&k.Rx, &k.Tx} {
		key, iv := block[side*c.key:][:c.key], block[2*c.key+side*fixed:][:fixed]
		*keys = layOut(c, key, iv, 1) // number 0 was Finished
	}
	return k
}

func keys13(t testing.TB, c *cipher, h func() hash.Hash, secret []byte) Keys {
	expand := func(label string, n int) []byte {
		label = "tls13 " + label
		info := binary.BigEndian.AppendUint16(nil, uint16(n))
		info = append(append(info, byte(len(label))), label...)
		b, err := hkdf.Expand(h, secret, string(append(info, 0)), n)
		ok(t, err)
		return b
	}
	return layOut(c, expand("key", c.key), expand("iv", 12), 0)
}

// layOut puts a direction's keys in the kernel's order.
func layOut(c *cipher, key, iv []byte, seq uint64) Keys {
	number := binary.BigEndian.AppendUint64(nil, seq)
	salt := iv[:c.salt]
	if iv = iv[c.salt:]; len(iv) == 0 { // GCM of TLS 1.2: each record says the rest
		iv = number
	}
	return bytes.Join([][]byte{iv, key, salt, number}, nil)
}

func prf12(h func() hash.Hash, secret, seed []byte, n int) (out []byte) {
	mac := func(parts ...[]byte) []byte {
		m := hmac.New(h, secret)
		for _, p := range parts {
			m.Write(p)
		}
		return m.Sum(nil)
	}
	for a := mac(seed); len(out) < n; a = mac(a) {
		out = append(out, mac(a, seed)...)
	}
	return out[:n]
}

var certificate = func() func(t testing.TB) tls.Certificate {
	make := sync.OnceValues(func() (c tls.Certificate, err error) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return c, err
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
	})
	return func(t testing.TB) tls.Certificate {
		c, err := make()
		ok(t, err)
		return c
	}
}()

// A session moves ten times, and what either end says in between arrives byte by byte.
func TestTLSMoves(t *testing.T) {
	needKTLS(t)
	for i, su := range suites {
		if i%2 == 1 && testing.Short() {
			continue
		}
		network := []string{"tcp4", "tcp6", "tcp"}[i%3]
		t.Run(su.name+", "+network, func(t *testing.T) {
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
	eventually(w.t, "all is acknowledged", func() (all bool) {
		in(w.t, tcp.(fresh).TCPConn, func(fd int) { l, err := queueLengths(fd); all = err == nil && l.unacked == 0 })
		return all
	})
}

// What the service sends is the kernel's, what it reads is its own: records that came and were not read move as bytes.
func TestTLSOnlyTx(t *testing.T) {
	needKTLS(t)
	w := newWorld(t)
	s := w.secure("tcp4", suites[0], onlyTx)
	const n = 3000
	request := make([]byte, n)
	pattern(request, 0)
	_, err := s.client.Write(request)
	ok(t, err)
	eventually(t, "the record is there", func() bool { return unread(t, s.server) > n })
	transmit(t, s.server, s.client, n, 0)
	w.acknowledged(fresh{s.server})
	c := w.move(fresh{s.server})
	if len(c.Unread()) <= n {
		t.Errorf("%d bytes unread", len(c.Unread()))
	}
	c = w.move(c)
	s.plain.NetConn().(*recorder).Conn = c // its TLS goes on reading at the new place
	got := make([]byte, n)
	_, err = io.ReadFull(s.plain, got)
	ok(t, err)
	ok(t, verify(got, 0))
	transmit(t, c, s.client, 1<<20, n)
	transmit(t, s.client, s.plain, 1<<20, n)
	w.WantNoResets()
}

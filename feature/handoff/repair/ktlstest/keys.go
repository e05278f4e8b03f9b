// SPDX-License-Identifier: Apache-2.0

// Package ktlstest gives the keys of crypto/tls to the kernel, like applications with a kTLS library. Only tests may
// import it.
package ktlstest

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
	"fmt"
	"hash"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Suite is a TLS version and cipher suite for a test.
type Suite struct {
	Name    string
	Version uint16
	ID      uint16 // 0: Go's choice, for TLS 1.3
}

// Suites are the tested suites.
var Suites = []Suite{
	{"TLS 1.3", tls.VersionTLS13, 0},
	{"TLS 1.2 with AES-128-GCM", tls.VersionTLS12, tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256},
	{"TLS 1.2 with AES-256-GCM", tls.VersionTLS12, tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384},
	{"TLS 1.2 with CHACHA20-POLY1305", tls.VersionTLS12, tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256},
}

// Keys are a service's keys in the layout of linux/tls.h: IV, key, salt and next record number of each direction.
type Keys struct {
	Version, Cipher uint16
	Tx, Rx          []byte
}

// cipher has the lengths of its key parts, in bytes.
type cipher struct{ iv, key, salt int }

var ciphers = map[uint16]cipher{51: {8, 16, 4}, 52: {8, 32, 4}, 54: {12, 32, 0}}

// Handshake performs a handshake with crypto/tls at both ends, and returns the service's keys. The caller sets
// deadlines on the connections.
func Handshake(t testing.TB, client, service net.Conn, s Suite) (*tls.Conn, *Service) {
	t.Helper()
	var log bytes.Buffer
	out := &Service{Conn: service}
	c := &tls.Config{InsecureSkipVerify: true, MinVersion: s.Version, MaxVersion: s.Version}
	if s.ID != 0 {
		c.CipherSuites = []uint16{s.ID}
	}
	near := tls.Client(client, c)
	sc := c.Clone()
	sc.Certificates, sc.KeyLogWriter, sc.SessionTicketsDisabled = []tls.Certificate{certificate(t)}, &log, true
	out.TLS = tls.Server(out, sc)
	done := make(chan error, 1)
	go func() { done <- out.TLS.Handshake() }()
	err := near.Handshake()
	if e := <-done; err == nil {
		err = e
	}
	if err != nil {
		t.Fatal(err)
	}
	out.Keys = deriveKeys(t, out.TLS.ConnectionState(), log.String(), out.flight)
	return near, out
}

// Service is the service's end of a handshake: the connection below its TLS, which the caller may replace.
type Service struct {
	net.Conn
	TLS    *tls.Conn
	Keys   Keys
	flight []byte // the first bytes written
}

func (s *Service) Write(b []byte) (int, error) {
	if len(s.flight) < 64 {
		s.flight = append(s.flight, b...)
	}
	return s.Conn.Write(b)
}

// Give makes the kernel encrypt and decrypt a socket's records.
func (k Keys) Give(fd int) error {
	if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_ULP, "tls"); err != nil {
		return fmt.Errorf("TCP_ULP: %w", err)
	}
	const tx, rx = 1, 2 // TLS_TX, TLS_RX
	for direction, keys := range map[int][]byte{tx: k.Tx, rx: k.Rx} {
		info := binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, k.Version), k.Cipher)
		if err := unix.SetsockoptString(fd, unix.SOL_TLS, direction, string(append(info, keys...))); err != nil {
			return fmt.Errorf("TLS keys, direction %d, cipher %d: %w", direction, k.Cipher, err)
		}
	}
	return nil
}

// deriveKeys derives the service's keys from Go's key log (RFC 8446, 7.3; RFC 5246, 6.3). flight is the service's
// first flight.
func deriveKeys(t testing.TB, cs tls.ConnectionState, log string, flight []byte) Keys {
	t.Helper()
	k := Keys{Version: cs.Version}
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
		secrets[f[0]] = [2][]byte{fromHex(t, f[1]), fromHex(t, f[2])}
	}
	c := ciphers[k.Cipher]
	if cs.Version == tls.VersionTLS13 {
		k.Tx = keys13(t, c, newHash, secrets["SERVER_TRAFFIC_SECRET_0"][1])
		k.Rx = keys13(t, c, newHash, secrets["CLIENT_TRAFFIC_SECRET_0"][1])
		return k
	}
	// ServerHello's random follows the headers of record and message, and the version.
	session := secrets["CLIENT_RANDOM"]
	seed := bytes.Join([][]byte{[]byte("key expansion"), flight[11:43], session[0]}, nil)
	fixed := c.salt // GCM: the part outside the record
	if c.salt == 0 {
		fixed = c.iv
	}
	block := prf12(newHash, session[1], seed, 2*c.key+2*fixed)
	for side, keys := range []*[]byte{&k.Rx, &k.Tx} {
		key, iv := block[side*c.key:][:c.key], block[2*c.key+side*fixed:][:fixed]
		*keys = layOut(c, key, iv, 1) // number 0 was Finished
	}
	return k
}

func fromHex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func keys13(t testing.TB, c cipher, h func() hash.Hash, secret []byte) []byte {
	t.Helper()
	expand := func(label string, n int) []byte {
		label = "tls13 " + label
		info := binary.BigEndian.AppendUint16(nil, uint16(n))
		info = append(append(info, byte(len(label))), label...)
		b, err := hkdf.Expand(h, secret, string(append(info, 0)), n)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	return layOut(c, expand("key", c.key), expand("iv", 12), 0)
}

// layOut orders a direction's keys in the kernel's layout.
func layOut(c cipher, key, iv []byte, seq uint64) []byte {
	number := binary.BigEndian.AppendUint64(nil, seq)
	salt := iv[:c.salt]
	if iv = iv[c.salt:]; len(iv) == 0 { // GCM of TLS 1.2: each record carries the rest
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
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
}()

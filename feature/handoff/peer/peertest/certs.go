// SPDX-License-Identifier: Apache-2.0

// Package peertest creates certificates for tests of agents and for experiments.
package peertest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"github.com/weir-project/weir/feature/handoff/peer"
)

// TB is the required part of testing.TB.
type TB interface {
	Helper()
	Fatal(...any)
	TempDir() string
}

// Authority is a CA of agents.
type Authority struct {
	t    TB
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority creates a CA in a directory removed with the test.
func NewAuthority(t TB) *Authority {
	t.Helper()
	a := &Authority{t: t, dir: t.TempDir()}
	a.key = a.newKey()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "weir test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.write("signers.pem", "CERTIFICATE", der)
	return a
}

func (a *Authority) newKey() *ecdsa.PrivateKey {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	return k
}

func (a *Authority) write(name, kind string, der []byte) string {
	path := filepath.Join(a.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// Files returns the paths of an agent's new certificate, its key and the CA.
func (a *Authority) Files(name string) (cert, key, signers string) {
	a.t.Helper()
	return a.FilesUntil(name, time.Now().Add(time.Hour))
}

// FilesUntil is Files with an expiry time.
func (a *Authority) FilesUntil(name string, end time.Time) (cert, key, signers string) {
	a.t.Helper()
	return a.sign(name, end, x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth)
}

func (a *Authority) sign(name string, end time.Time, uses ...x509.ExtKeyUsage) (cert, key, signers string) {
	a.t.Helper()
	k := a.newKey()
	template := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: end,
		ExtKeyUsage: uses}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &k.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	bytes, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	return a.write(name+".pem", "CERTIFICATE", der), a.write(name+".key", "PRIVATE KEY", bytes), filepath.Join(a.dir, "signers.pem")
}

// TLS returns the identity of an agent.
func (a *Authority) TLS(name string) *peer.Identity {
	a.t.Helper()
	return a.load(a.Files(name))
}

// ExpiredTLS is TLS with an expired certificate.
func (a *Authority) ExpiredTLS(name string) *peer.Identity {
	a.t.Helper()
	return a.load(a.FilesUntil(name, time.Now().Add(-time.Minute)))
}

// ClientTLS is TLS with a certificate for clients alone.
func (a *Authority) ClientTLS(name string) *peer.Identity {
	a.t.Helper()
	return a.load(a.sign(name, time.Now().Add(time.Hour), x509.ExtKeyUsageClientAuth))
}

func (a *Authority) load(cert, key, signers string) *peer.Identity {
	a.t.Helper()
	c, err := peer.Files{Certificate: cert, Key: key, CA: signers}.Load()
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

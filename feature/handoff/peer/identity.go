// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/internal/secret"
)

// Files are the PEM files of an agent's certificate, its key, and the CA of all agents. Each is a
// path or a credential of the unit ([secret.Locate]).
type Files struct {
	Certificate string `yaml:"certificate" path:"credential"`
	Key         string `yaml:"key" path:"credential"`
	CA          string `yaml:"ca" path:"credential" former:"signers"`
}

// located returns the files with paths in place of credentials.
func (f Files) located() (Files, error) {
	var err error
	for _, name := range []*string{&f.Certificate, &f.Key, &f.CA} {
		path, lerr := secret.Locate(*name)
		*name, err = path, errors.Join(err, lerr)
	}
	return f, err
}

// reloadEvery is the interval of checks for changed files.
const reloadEvery = 2 * time.Second

const maxPEM = 1 << 20 // bytes of a file of certificates

// Identity is an agent's certificate with its key, and the CA of all agents. [Identity.Watch]
// reloads the files when they change. Open connections keep the certificate of their handshake.
type Identity struct {
	files Files

	mu      sync.Mutex
	config  *tls.Config
	read    [3]stamp // of the files behind config
	problem string   // why changed files are not used
	suspect string   // a problem seen once: files are replaced one after the other
}

// Config returns the configuration for the next connection.
func (i *Identity) Config() *tls.Config {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.config
}

// Certificate is the status of an agent's certificate.
type Certificate struct {
	NotAfter time.Time `json:"not_after"`
	Problem  string    `json:"problem,omitempty"` // why changed files are not used
}

// stamp changes when a file is written or replaced.
type stamp struct {
	dev, ino, size       uint64
	changed, mode, owner int64
	err                  string
}

func readStamp(path string) (s stamp) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return stamp{err: err.Error()}
	}
	return stamp{dev: uint64(st.Dev), ino: st.Ino, size: uint64(st.Size), changed: st.Ctim.Nano(), mode: int64(st.Mode), owner: int64(st.Uid)<<32 | int64(st.Gid)}
}

func (f Files) stamps() [3]stamp {
	return [3]stamp{readStamp(f.Certificate), readStamp(f.Key), readStamp(f.CA)}
}

// Load reads the files. Outside a unit with credentials, the error for a credential wraps
// [secret.ErrNoCredentials].
func (f Files) Load() (*Identity, error) {
	f, err := f.located()
	if err != nil {
		return nil, err
	}
	i := &Identity{files: f, read: f.stamps()}
	if i.config, err = f.config(); err != nil {
		return nil, err
	}
	return i, nil
}

// LoadFor reads the files of an agent. It fails if the certificate is for another name, because
// other agents would reject it.
func (f Files) LoadFor(name string) (*Identity, error) {
	i, err := f.Load()
	if err != nil {
		return nil, err
	}
	if err := isFor(i.config.Certificates[0].Leaf, name); err != nil {
		return nil, fmt.Errorf("the agent's certificate %s: %w", f.Certificate, err)
	}
	return i, nil
}

// isFor returns an error if a certificate is not for an agent of this name. The name must be one of
// its DNS names, byte by byte. With wildcards, case folding or a trailing dot one certificate would
// fit many agents.
func isFor(c *x509.Certificate, name string) error {
	if name == "" || strings.Contains(name, "*") || strings.HasSuffix(name, ".") {
		return fmt.Errorf("%.260q is no valid agent name: take one without * and trailing dot, for the agent and as DNS name of its certificate", name)
	}
	if !slices.Contains(c.DNSNames, name) {
		return fmt.Errorf("the certificate is for the DNS names %.260q, not for %q, the name of this agent: use exactly the same name for both", c.DNSNames[:min(len(c.DNSNames), 8)], name)
	}
	return nil
}

// config reads the files. Both sides must show a certificate of the CA. No other right is checked,
// so the CA should be for weir alone.
func (f Files) config() (*tls.Config, error) {
	chain, err := safefile.Read(f.Certificate, maxPEM)
	if err != nil {
		return nil, fmt.Errorf("the agent's certificate: %w", err)
	}
	private, err := secret.ReadTLS(f.Key)
	if err != nil {
		return nil, fmt.Errorf("the key of the agent's certificate: %w", err)
	}
	own, err := tls.X509KeyPair(chain.Data, private)
	if err != nil {
		return nil, fmt.Errorf("the agent's certificate: %s with the key %s: %w", f.Certificate, f.Key, err)
	}
	signers, err := safefile.Read(f.CA, maxPEM)
	if err != nil {
		return nil, fmt.Errorf("the CA of agents' certificates: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(signers.Data) {
		return nil, fmt.Errorf("%s: no certificate in PEM", f.CA)
	}
	// Otherwise a new connection's TLS records have one segment each, with one system call each.
	// The first sessions moved over it would pause for longer.
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own}, RootCAs: pool, ClientCAs: pool,
		ClientAuth: tls.RequireAndVerifyClientCert, DynamicRecordSizingDisabled: true}, nil
}

// verifyAny makes a client accept a server with one of several names. The other checks are
// crypto/tls's own: the chain to the roots with the server's intermediates, the time, and the use
// as a server.
func verifyAny(config *tls.Config, names []string) {
	roots := config.RootCAs
	config.InsecureSkipVerify = true //nolint:gosec // VerifyConnection verifies
	config.VerifyConnection = func(s tls.ConnectionState) (err error) {
		certs := s.PeerCertificates
		if len(certs) == 0 {
			return errors.New("the agent shows no certificate")
		}
		between := x509.NewCertPool()
		for _, c := range certs[1:] {
			between.AddCert(c)
		}
		for _, name := range names {
			_, err = certs[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: between, DNSName: name, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
			if other := (x509.HostnameError{}); !errors.As(err, &other) {
				break
			}
		}
		if err != nil {
			return &tls.CertificateVerificationError{UnverifiedCertificates: certs, Err: err}
		}
		return nil
	}
}

// usable returns why a reloaded certificate is worse than the one in use.
func usable(fresh, before *x509.Certificate, name string, now time.Time) error {
	for _, bad := range []struct {
		what string
		is   func(*x509.Certificate) bool
	}{
		{fmt.Sprintf("it has expired at %s", fresh.NotAfter.UTC().Format(time.RFC3339)), func(c *x509.Certificate) bool { return now.After(c.NotAfter) }},
		{fmt.Sprintf("it is not valid before %s", fresh.NotBefore.UTC().Format(time.RFC3339)), func(c *x509.Certificate) bool { return now.Before(c.NotBefore) }},
		{fmt.Sprintf("it is not for %q, the name of this agent", name), func(c *x509.Certificate) bool { return isFor(c, name) != nil }},
	} {
		if bad.is(fresh) && !bad.is(before) {
			return errors.New("the agent's certificate: " + bad.what)
		}
	}
	return nil
}

// Certificate returns the status of the certificate in use, nil without an identity.
func (i *Identity) Certificate() *Certificate {
	if i == nil {
		return nil
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return &Certificate{NotAfter: i.config.Certificates[0].Leaf.NotAfter, Problem: i.problem}
}

// Watch reloads the files when they change, until ctx is done. Unusable files leave the previous
// ones in use. name is the agent's. A hanging file system can keep Watch from returning.
func (i *Identity) Watch(ctx context.Context, name string, log *slog.Logger) {
	if i == nil {
		return
	}
	tick := time.NewTicker(reloadEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			i.reload(name, log)
		}
	}
}

// reload reads the files if they differ from the ones in use.
func (i *Identity) reload(name string, log *slog.Logger) {
	now := i.files.stamps()
	if !i.differ(now) {
		return
	}
	config, err := i.files.config()
	if now != i.files.stamps() {
		return // they are being replaced, one after the other
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if err == nil {
		err = usable(config.Certificates[0].Leaf, i.config.Certificates[0].Leaf, name, time.Now())
	}
	if err != nil {
		i.reject(err, log)
		return
	}
	i.config, i.read, i.problem, i.suspect = config, now, "", ""
	log.Info("certificate reloaded", "certificate", i.files.Certificate, "expires", config.Certificates[0].Leaf.NotAfter)
}

// differ reports whether the files differ from the ones in use. It clears the problem if the files
// were restored.
func (i *Identity) differ(now [3]stamp) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if now == i.read {
		i.problem, i.suspect = "", ""
	}
	return now != i.read
}

// reject keeps the certificate in use. The caller holds mu. An error is a problem only at the
// second check, because the key may follow its certificate a moment later.
func (i *Identity) reject(err error, log *slog.Logger) {
	text := err.Error()
	if i.suspect != text {
		i.suspect = text
		return
	}
	if i.problem != text {
		i.problem = text
		log.Warn("new certificate rejected, previous one stays in use", "err", err, "expires", i.config.Certificates[0].Leaf.NotAfter)
	}
}

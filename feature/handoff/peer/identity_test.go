// SPDX-License-Identifier: Apache-2.0

package peer_test

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/secret"
)

// rotation is an agent whose files change.
type rotation struct {
	t         *testing.T
	ca        *peertest.Authority
	id, other *peer.Identity
	peer.Files
	log bytes.Buffer
}

func newRotation(t *testing.T) *rotation {
	r := &rotation{t: t, ca: peertest.NewAuthority(t)}
	r.other = r.ca.TLS("host-a")
	r.Certificate, r.Key, r.CA = r.ca.Files("lb")
	id, err := r.Load()
	if err != nil {
		t.Fatal(err)
	}
	r.id = id
	return r
}

// look runs three checks of the files and returns the log lines.
func (r *rotation) look() []string {
	r.log.Reset()
	for range 3 {
		r.id.Reload("lb", slog.New(slog.NewTextHandler(&r.log, nil)))
	}
	return strings.Split(strings.TrimSuffix(r.log.String(), "\n"), "\n")
}

func (r *rotation) write(path, text string, mode os.FileMode) {
	r.t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rotation) read(path string) string {
	r.t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(b)
}

// leaf returns the certificate shown to a new connection.
func (r *rotation) leaf() string {
	r.t.Helper()
	a, b, errA, errB := pair(r.t, r.other, r.id)
	if errA != nil || errB != nil {
		r.t.Fatalf("an agent cannot connect: %v, %v", errA, errB)
	}
	defer a.Close()
	defer b.Close()
	return string(r.id.Config().Certificates[0].Certificate[0])
}

// TestCertificateOfAnotherAgent checks that an agent does not start with a certificate for another
// name. Nobody would accept it.
func TestCertificateOfAnotherAgent(t *testing.T) {
	r := newRotation(t)
	if _, err := r.LoadFor("lb"); err != nil {
		t.Fatal(err)
	}
	_, err := r.LoadFor("lb2")
	if err == nil || !strings.Contains(err.Error(), `not for "lb2"`) || !strings.Contains(err.Error(), r.Certificate) {
		t.Fatalf("%v: want the file and the name", err)
	}
}

// TestNameLetterByLetter checks that another spelling of a certificate's DNS name is another name,
// on both sides and in the agent's own files.
func TestNameLetterByLetter(t *testing.T) {
	ca := peertest.NewAuthority(t)
	ca.Files("*.evil")
	ca.Files("evil.") // signed, but not valid for an agent
	for _, c := range []struct{ cert, name string }{
		{"evil", "EVIL"}, {"evil", "Evil"}, {"evil", "evil."}, {"Evil", "evil"}, {"*.evil", "a.evil"}, {"*.evil", "*.evil"}, {"evil.", "evil."}, {"evil", ""},
	} {
		cert, key, signers := ca.Files(c.cert)
		_, err := peer.Files{Certificate: cert, Key: key, CA: signers}.LoadFor(c.name)
		if err == nil || !strings.Contains(err.Error(), "name") || !strings.Contains(err.Error(), cert) {
			t.Errorf("own certificate for %q, agent %q: %v", c.cert, c.name, err)
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			if d, err := peer.Dial(t.Context(), l.Addr().String(), "lb", ca.TLS(c.cert), peer.Hello{Number: 3, Name: c.name}); err == nil {
				defer d.Close()
				_, _ = d.Receive()
			}
		}()
		raw, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		a, err := peer.Accept(t.Context(), raw, ca.TLS("lb"), peer.Hello{Role: peer.LBAgent, Name: "lb"})
		if err == nil {
			a.Close()
			t.Errorf("with the certificate for %q an agent is %q", c.cert, c.name)
		}
	}
	// The dialling side requires the exact name too.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if raw, err := l.Accept(); err == nil {
			_, _ = peer.Accept(t.Context(), raw, ca.TLS("lb"), peer.Hello{Role: peer.LBAgent, Name: "lb"})
		}
	}()
	if _, err = peer.Dial(t.Context(), l.Addr().String(), "LB", ca.TLS("host-a"), peer.Hello{Number: 3, Name: "host-a"}); err == nil || !strings.Contains(err.Error(), `its name is "lb", not "LB"`) {
		t.Errorf("%v", err)
	}
}

// TestCertificateIsReadAnew checks that the files are reloaded however they are replaced.
func TestCertificateIsReadAnew(t *testing.T) {
	for name, replace := range map[string]func(r *rotation){
		"written over": func(r *rotation) { r.ca.Files("lb") },
		"renamed": func(r *rotation) {
			old := map[string]string{r.Certificate: r.read(r.Certificate), r.Key: r.read(r.Key)}
			r.ca.Files("lb")
			for path, was := range old {
				fresh := r.read(path)
				r.write(path, was, 0o600)
				r.write(path+".new", fresh, 0o600)
				if err := os.Rename(path+".new", path); err != nil {
					r.t.Fatal(err)
				}
			}
		},
		"a link to another directory": func(r *rotation) {
			link := filepath.Join(r.t.TempDir(), "live")
			first, second := filepath.Dir(r.Certificate), filepath.Join(r.t.TempDir(), "second")
			if err := os.CopyFS(second, os.DirFS(first)); err != nil {
				r.t.Fatal(err)
			}
			if err := os.Symlink(second, link); err != nil {
				r.t.Fatal(err)
			}
			in := func(path string) string { return filepath.Join(link, filepath.Base(path)) }
			if err := os.Chmod(filepath.Join(second, filepath.Base(r.Key)), 0o600); err != nil {
				r.t.Fatal(err)
			}
			id, err := peer.Files{Certificate: in(r.Certificate), Key: in(r.Key), CA: in(r.CA)}.Load()
			if err != nil {
				r.t.Fatal(err)
			}
			r.id = id
			r.ca.Files("lb") // in the first directory
			if err := os.Symlink(first, link+".new"); err != nil {
				r.t.Fatal(err)
			}
			if err := os.Rename(link+".new", link); err != nil {
				r.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRotation(t)
			before := r.leaf()
			if lines := r.look(); lines[0] != "" {
				t.Errorf("nothing has changed: %q", lines)
			}
			replace(r)
			lines := r.look()
			if r.leaf() == before || len(lines) != 1 || !strings.Contains(lines[0], "certificate reloaded") {
				t.Errorf("after the files were replaced the certificate is another one: %v; log %q", r.leaf() != before, lines)
			}
		})
	}
}

// TestBadCertificateIsRefused checks that unusable files leave the previous ones in use, and that
// log and status give the reason once.
func TestBadCertificateIsRefused(t *testing.T) {
	for _, c := range []struct {
		name, want string
		change     func(r *rotation)
	}{
		{"no key", "not found|no such file", func(r *rotation) { os.Remove(r.Key) }},
		{"a key of another certificate", "private key does not match", func(r *rotation) {
			r.write(r.Key, r.read(keyOf(r.ca, "other")), 0o600)
		}},
		{"a key that others may read", "chmod 640", func(r *rotation) { r.write(r.Key, r.read(r.Key), 0o644) }},
		{"a torn certificate", "the agent's certificate", func(r *rotation) { r.write(r.Certificate, r.read(r.Certificate)[:200], 0o600) }},
		{"no signers", "no certificate in PEM", func(r *rotation) { r.write(r.CA, "", 0o600) }},
		{"another agent's", `not for "lb"`, func(r *rotation) {
			cert, key, _ := r.ca.Files("other")
			r.write(r.Certificate, r.read(cert), 0o600)
			r.write(r.Key, r.read(key), 0o600)
		}},
		{"expired", "has expired", func(r *rotation) { r.ca.FilesUntil("lb", time.Now().Add(-time.Minute)) }},
		{"a FIFO", "FIFO", func(r *rotation) {
			os.Remove(r.Certificate)
			if err := unix.Mkfifo(r.Certificate, 0o600); err != nil {
				r.t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRotation(t)
			before := r.leaf()
			was := [...]string{r.read(r.Certificate), r.read(r.Key), r.read(r.CA)}
			c.change(r)
			lines := r.look()
			said := r.id.Certificate().Problem
			matches := false
			for want := range strings.SplitSeq(c.want, "|") {
				matches = matches || strings.Contains(said, want)
			}
			if r.leaf() != before || len(lines) != 1 || !strings.Contains(lines[0], "stays in use") || !matches {
				t.Errorf("still the one before: %v; problem %q, log %q", r.leaf() == before, said, lines)
			}
			if lines := r.look(); lines[0] != "" {
				t.Errorf("said again: %q", lines)
			}
			os.Remove(r.Certificate) // a FIFO would be written to
			for i, path := range []string{r.Certificate, r.Key, r.CA} {
				r.write(path, was[i], 0o600)
			}
			if r.look(); r.id.Certificate().Problem != "" || r.leaf() != before {
				t.Errorf("put right again: %q", r.id.Certificate().Problem)
			}
		})
	}
}

func keyOf(ca *peertest.Authority, name string) string {
	_, key, _ := ca.Files(name)
	return key
}

// Credentials of the unit replace paths. Outside a unit with credentials the error names the line to add.
func TestCredentials(t *testing.T) {
	cert, key, ca := peertest.NewAuthority(t).Files("lb")
	f := peer.Files{Certificate: "credential:weir-cert", Key: "credential:weir-key", CA: "credential:weir-ca"}
	if _, err := f.LoadFor("lb"); !errors.Is(err, secret.ErrNoCredentials) || !strings.Contains(err.Error(), "LoadCredential=weir-key:") {
		t.Errorf("without credentials: %v", err)
	}
	dir := t.TempDir()
	t.Setenv("CREDENTIALS_DIRECTORY", dir)
	for name, path := range map[string]string{"weir-cert": cert, "weir-key": key, "weir-ca": ca} {
		text, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o400)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.LoadFor("lb"); err != nil {
		t.Error(err)
	}
	if _, err := f.LoadFor("lb-b"); err == nil {
		t.Error("the certificate of another agent is accepted")
	}
}

// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/lab"
)

// UnitNice is Nice= of the units of keeper, backend and load balancer (examples/handoff).
const UnitNice = -10

// Serve is one weir serve of some features in a network namespace, with the weir.yaml of the machine that the namespace stands for.
type Serve struct {
	Namespace string    // its name
	Name      string    // of the file, and of its log where Output is nil
	Root      string    // of its pins; empty: the run's
	Only      string    // features, like backend,keeper
	Text      string    // of the file
	Flags     []string  // of weir serve
	Output    io.Writer // nil: a log beside the file
}

// Start writes the file into the run's directory and starts weir serve. What the file declares begins in its own time.
func (s Serve) Start(e *lab.Env) (*lab.Process, error) {
	weir, err := e.Weir()
	if err != nil {
		return nil, err
	}
	file := filepath.Join(e.Dir, s.Name+".yaml")
	if err := os.WriteFile(file, []byte(s.Text), 0o600); err != nil {
		return nil, err
	}
	out := s.Output
	if out == nil {
		log, err := os.OpenFile(filepath.Join(e.Dir, s.Name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, err
		}
		defer log.Close()
		out = log
	}
	args := append([]string{"--root", cmp.Or(s.Root, e.Root), "serve", "-f", file, "--only", s.Only}, s.Flags...)
	return e.Start(lab.Command{Namespace: s.Namespace, Path: weir, Args: args, Nice: UnitNice, Output: out})
}

// Certificates make the certificates of agents, in a directory of the run.
type Certificates struct{ *peertest.Authority }

// certDir lets the authority of the tests work for the lab.
type certDir struct{ dir string }

func (certDir) Helper()           {}
func (certDir) Fatal(a ...any)    { panic(fmt.Sprint(a...)) } // the directory is the run's own
func (c certDir) TempDir() string { return c.dir }

// NewCertificates makes the directory and the authority that signs.
func NewCertificates(e *lab.Env, name string) (Certificates, error) {
	dir := filepath.Join(e.Dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return Certificates{}, err
	}
	return Certificates{peertest.NewAuthority(certDir{dir})}, nil
}

// TLS is the value of an agent's key tls.
func (c Certificates) TLS(name string) string {
	cert, key, signers := c.Files(name)
	return fmt.Sprintf("{certificate: %s, key: %s, ca: %s}", cert, key, signers)
}

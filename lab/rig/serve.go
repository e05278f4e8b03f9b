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

// Serve is one weir serve of some features in a network namespace. It uses the weir.yaml of the machine
// behind the namespace.
type Serve struct {
	Namespace string    // its name
	Name      string    // of the file, and of its log if Output is nil
	Root      string    // of its pins; empty: root of the run
	Only      string    // features, such as backend,keeper
	Text      string    // of the file
	Flags     []string  // of weir serve
	Output    io.Writer // nil: a log beside the file
}

// Start writes the file into the run's directory and starts weir serve. It does not wait until the declared
// features are up.
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

// Certificates creates certificates of agents, in a directory of the run.
type Certificates struct{ *peertest.Authority }

// certDir adapts the authority of the tests to the lab.
type certDir struct{ dir string }

func (certDir) Helper()           {}
func (certDir) Fatal(a ...any)    { panic(fmt.Sprint(a...)) } // the directory belongs to the run
func (c certDir) TempDir() string { return c.dir }

// NewCertificates creates the directory and the signing authority.
func NewCertificates(e *lab.Env, name string) (Certificates, error) {
	dir := filepath.Join(e.Dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return Certificates{}, err
	}
	return Certificates{peertest.NewAuthority(certDir{dir})}, nil
}

// TLS returns the value of an agent's key tls.
func (c Certificates) TLS(name string) string {
	cert, key, signers := c.Files(name)
	return fmt.Sprintf("{certificate: %s, key: %s, ca: %s}", cert, key, signers)
}

// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/lab"
)

// Weir runs weir like a user: a configuration file, the command line, `weir serve` beside it.
type Weir struct {
	env       *lab.Env
	namespace string // of all collectors
	binary    string // see Upgrade
	other     string
	config    string
	socket    string

	text     string     // of the configuration, if given
	mu       sync.Mutex // held from a change of the file until it is applied
	services []*Service
}

// NewWeir returns a Weir for services with their collectors in one namespace. Apply writes the
// configuration.
func NewWeir(e *lab.Env, namespace string, services ...*Service) (*Weir, error) {
	binary, err := e.Weir()
	if err != nil {
		return nil, err
	}
	w := &Weir{env: e, namespace: namespace, binary: binary, config: filepath.Join(e.Dir, "weir.yaml"), socket: filepath.Join(e.Dir, "weir.sock")}
	w.Add(services...)
	return w, nil
}

// NewWeirFrom returns a Weir for a configuration given as text: several namespaces, several engines.
// services are the services to query.
func NewWeirFrom(e *lab.Env, config string, services ...*Service) (*Weir, error) {
	w, err := NewWeir(e, "", services...)
	if err == nil {
		w.text = config
	}
	return w, err
}

// Rewrite replaces the text of the configuration; Apply applies it.
func (w *Weir) Rewrite(config string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = config
}

// Add adds services to the configuration.
func (w *Weir) Add(services ...*Service) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range services {
		s.weir = w
	}
	w.services = append(w.services, services...)
}

// yaml returns the configuration file of the current services.
func (w *Weir) yaml() []byte {
	if w.text != "" {
		return []byte(w.text)
	}
	b := []byte("services:\n")
	for _, s := range w.services {
		options := ""
		if s.Engine != "" {
			options = ", engine: " + s.Engine
		}
		if s.Exact {
			options += ", templates: false"
		}
		b = fmt.Appendf(b, `  %s:
    listen: ["%s"]
    netns: %s
    steer: {by: source, slots: %d, on_empty: reject, seed: %d%s}
    members:
`, s.Name, strings.Join(s.Listen, `", "`), w.namespace, len(s.Serving()), uint32(w.env.Seed), options)
		for _, c := range s.Serving() {
			bound := ""
			if len(c.Bound) > 0 {
				bound = ", bound: [" + strings.Join(c.Bound, ", ") + "]"
			}
			b = fmt.Appendf(b, "      - {slot: %d, pidfile: %s%s}\n", c.Number, c.PIDFile, bound)
		}
	}
	return b
}

// Run executes a command of weir and returns its stdout.
func (w *Weir) Run(ctx context.Context, args ...string) ([]byte, error) {
	var out, errs bytes.Buffer
	p, err := w.env.Start(lab.Command{Path: w.binary, Args: append([]string{"--root", w.env.Root, "--socket", w.socket}, args...),
		Stdout: &out, Output: &errs, Timeout: time.Minute})
	if err != nil {
		return nil, err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if err := p.Err(); err != nil {
		return nil, fmt.Errorf("weir %s: %w: %s", strings.Join(args[:min(3, len(args))], " "), err, strings.TrimSpace(errs.String()))
	}
	return out.Bytes(), nil
}

// Apply applies the configuration; flags are flags of weir apply.
func (w *Weir) Apply(ctx context.Context, flags ...string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := os.WriteFile(w.config, w.yaml(), 0o644); err != nil {
		return err
	}
	_, err := w.Run(ctx, append([]string{"apply", "-f", w.config}, flags...)...)
	return err
}

// Config returns the path of the configuration file.
func (w *Weir) Config() string { return w.config }

// Remove removes weir.
func (w *Weir) Remove(ctx context.Context) error {
	_, err := w.Run(ctx, "remove", "--allow-outage")
	return err
}

// Serve starts weir serve. It assigns slots to starting members.
func (w *Weir) Serve() (*lab.Process, error) {
	log, err := os.Create(filepath.Join(w.env.Dir, "weir-serve.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	return w.env.Start(lab.Command{Path: w.binary, Output: log,
		Args: []string{"--root", w.env.Root, "--socket", w.socket, "serve", "--listen", ""}})
}

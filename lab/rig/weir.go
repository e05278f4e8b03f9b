// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/weir-project/weir/lab"
)

// Weir runs the product as its users do: a configuration file, the command line, `weir serve` beside it.
type Weir struct {
	env    *lab.Env
	binary string
	config string
	socket string
}

// NewWeir writes the configuration for services whose collectors are in a namespace.
func NewWeir(e *lab.Env, namespace string, services ...*Service) (*Weir, error) {
	binary, err := e.Weir()
	if err != nil {
		return nil, err
	}
	w := &Weir{env: e, binary: binary, config: filepath.Join(e.Dir, "weir.yaml"), socket: filepath.Join(e.Dir, "weir.sock")}
	var b strings.Builder
	b.WriteString("services:\n")
	for _, s := range services {
		s.weir = w
		fmt.Fprintf(&b, `  %s:
    listen: [%s]
    netns: %s
    steer: {by: source, slots: %d, on_empty: reject, seed: %d}
    members:
`, s.Name, strings.Join(s.Listen, ", "), namespace, len(s.Collectors), uint32(e.Seed))
		for _, c := range s.Collectors {
			bound := ""
			if len(c.Bound) > 0 {
				bound = ", bound: [" + strings.Join(c.Bound, ", ") + "]"
			}
			fmt.Fprintf(&b, "      - {slot: %d, pidfile: %s%s}\n", c.Number, c.PIDFile, bound)
		}
	}
	return w, os.WriteFile(w.config, []byte(b.String()), 0o644)
}

// Run executes a command of weir and returns its stdout.
func (w *Weir) Run(ctx context.Context, args ...string) ([]byte, error) {
	var out, errs bytes.Buffer
	p, err := w.env.Start(lab.Command{Path: w.binary, Args: append([]string{"--root", w.env.Root, "--socket", w.socket}, args...),
		Stdout: &out, Output: &errs})
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

// Apply applies the configuration.
func (w *Weir) Apply(ctx context.Context) error {
	_, err := w.Run(ctx, "apply", "-f", w.config)
	return err
}

// Remove takes weir away.
func (w *Weir) Remove(ctx context.Context) error {
	_, err := w.Run(ctx, "remove")
	return err
}

// Serve starts the process that gives slots to members as they start.
func (w *Weir) Serve() (*lab.Process, error) {
	log, err := os.Create(filepath.Join(w.env.Dir, "weir-serve.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	return w.env.Start(lab.Command{Path: w.binary, Output: log,
		Args: []string{"--root", w.env.Root, "--socket", w.socket, "serve", "--listen", ""}})
}

// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// Host is a network namespace in the place of a machine. Commands run there.
type Host struct {
	*netns.Handle
	Name  string // of the namespace
	stage *Stage
	label string
	root  string // of its pins; "": root of the run
}

// Host creates a host with a loopback interface and these addresses.
func (s *Stage) Host(label string, addrs ...string) (*Host, error) {
	ns, full, err := s.Namespace(label)
	if err != nil {
		return nil, err
	}
	h := &Host{Handle: ns, Name: full, stage: s, label: label}
	if err := os.MkdirAll(h.dir(), 0o755); err != nil {
		return nil, err
	}
	return h, topo.Addresses(ns, prefixes(addrs...)...)
}

// Machine creates a host with pins of its own. Every weir serve checks all pins of its root for damage.
func (s *Stage) Machine(label string, addrs ...string) (*Host, error) {
	if err := os.MkdirAll(s.Root, 0o700); err != nil {
		return nil, err
	}
	h, err := s.Host(label, addrs...)
	if err == nil {
		h.root = filepath.Join(s.Root, label)
	}
	return h, err
}

// dir holds the sockets of the host's weir.
func (h *Host) dir() string { return filepath.Join(h.stage.Dir, "run-"+h.label) }

// Cable connects two hosts. Each address has a prefix length.
func Cable(a *Host, deviceA, addrA string, b *Host, deviceB, addrB string) error {
	return topo.Cable(topo.End{NS: a.Handle, Name: deviceA, Addrs: prefixes(addrA)}, topo.End{NS: b.Handle, Name: deviceB, Addrs: prefixes(addrB)})
}

func prefixes(s ...string) (all []netip.Prefix) {
	for _, p := range s {
		all = append(all, netip.MustParsePrefix(p))
	}
	return all
}

// keeper is the socket of the host's session keeper.
func (h *Host) keeper() string { return filepath.Join(h.dir(), "handoff.sock") }

// flags select the pins and the socket of this host.
func (h *Host) flags() []string {
	return []string{"--root", cmp.Or(h.root, h.stage.Root), "--socket", filepath.Join(h.dir(), "weir.sock")}
}

// Run runs a command of weir on the host and returns its output.
func (h *Host) Run(ctx context.Context, args ...string) (string, error) {
	weir, err := h.stage.Weir()
	if err != nil {
		return "", err
	}
	return h.Exec(ctx, weir, append(h.flags(), args...)...)
}

// Exec runs any program on the host and returns its output.
func (h *Host) Exec(ctx context.Context, program string, args ...string) (string, error) {
	var out bytes.Buffer
	p, err := h.stage.Start(lab.Command{Namespace: h.Name, Path: program, Args: args, Output: &out, Timeout: time.Minute})
	if err != nil {
		return "", err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		return "", ctx.Err()
	}
	if err := p.Err(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(append([]string{filepath.Base(program)}, args...), " "), err, strings.TrimSpace(out.String()))
	}
	return out.String(), nil
}

// shownLines is the number of shown lines of a command's output.
const shownLines = 7

// Type runs a command of weir as a person would, and shows it with its output.
func (h *Host) Type(ctx context.Context, args ...string) (string, error) {
	h.stage.Typed("weir %s", quoted(args))
	out, err := h.Run(ctx, args...)
	if err == nil {
		h.stage.Output(out, shownLines)
		err = h.stage.Pace(ctx, time.Second)
	}
	return out, err
}

// quoted joins arguments as in a shell, with base names for files of the run.
func quoted(args []string) string {
	var all []string
	for _, a := range args {
		if strings.HasPrefix(a, os.TempDir()+"/weir-lab-") {
			a = filepath.Base(a)
		}
		if strings.ContainsAny(a, " |&$*<>()'\"") {
			a = "'" + a + "'"
		}
		all = append(all, a)
	}
	return strings.Join(all, " ")
}

// File writes a file of the run, shows it, and returns its path.
func (s *Stage) File(name, text string) (string, error) {
	path := filepath.Join(s.Dir, name)
	s.Watch.Print("# " + name)
	s.Output(text, 12)
	return path, os.WriteFile(path, []byte(text), 0o600)
}

// Serve starts weir serve on the host. Its log is a file of the run.
func (h *Host) Serve(args ...string) (*lab.Process, error) {
	weir, err := h.stage.Weir()
	if err != nil {
		return nil, err
	}
	return h.Daemon("serve", weir, append(append(h.flags(), "serve", "--listen", ""), args...)...)
}

// Daemon starts a program on the host. Its output is the file NAME.log of the run.
func (h *Host) Daemon(name, program string, args ...string) (*lab.Process, error) {
	log, err := os.OpenFile(filepath.Join(h.stage.Dir, h.label+"-"+name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	return h.stage.Start(lab.Command{Namespace: h.Name, Path: program, Args: args, Output: log})
}

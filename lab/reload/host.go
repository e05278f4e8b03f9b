// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/topo"
)

// host runs every server once, for clients one cable away.
type host struct {
	env     *lab.Env
	client  *netns.Handle
	name    string // of its namespace
	clients string // of the clients' namespace
	addr    string
	dir     string
	weir    *rig.Weir // nil: without
	servers []*server
	until   time.Time // no server is changed after this time
}

// server is one server: its current process, and the number of processes so far.
type server struct {
	kind
	host    *host
	service *rig.Service
	proc    *lab.Process // the server, or weir steer run
	log     *os.File
	n       int
}

// startLimit is the longest start or end of a server, on a busy machine.
const startLimit = 60 * time.Second

func newHost(ctx context.Context, e *lab.Env, name string, weir bool) (*host, error) {
	h := &host{env: e, addr: "192.0.2.1", dir: filepath.Join(e.Dir, name)}
	if err := os.Mkdir(h.dir, 0o755); err != nil {
		return nil, err
	}
	ns, full, err := e.Namespace(name)
	if err != nil {
		return nil, err
	}
	h.name = full
	if h.client, h.clients, err = e.Namespace(name + "-clients"); err != nil {
		return nil, err
	}
	for _, n := range []*netns.Handle{ns, h.client} {
		if err := topo.Configure(topo.End{NS: n, Name: "lo"}); err != nil {
			return nil, err
		}
	}
	err = topo.Cable(topo.End{NS: ns, Name: "clients", Addrs: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}},
		topo.End{NS: h.client, Name: "servers", Addrs: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/24")}})
	if err != nil {
		return nil, err
	}
	if err := writeCertificate(h.dir); err != nil {
		return nil, err
	}
	config := "services:\n"
	for _, k := range kinds {
		h.servers = append(h.servers, &server{kind: k, host: h, service: &rig.Service{Name: k.name}})
		config += fmt.Sprintf("  %s:\n    listen: [%s]\n    netns: %s\n    steer: {slots: 1, by: flow, share_port: true, generations: {idle: %s, deadline: %s}}\n",
			k.name, k.listen, h.name, k.idle, k.deadline)
	}
	if weir {
		if h.weir, err = rig.NewWeirFrom(e, config); err != nil {
			return nil, err
		}
		for _, s := range h.servers {
			h.weir.Add(s.service)
		}
		if err := h.weir.Apply(ctx); err != nil {
			return nil, err
		}
	}
	return h, h.each(func(s *server) error { return s.first(ctx) })
}

// each runs f for all servers at the same time.
func (h *host) each(f func(s *server) error) error {
	var wg sync.WaitGroup
	errs := make([]error, len(h.servers))
	for i, s := range h.servers {
		wg.Go(func() { errs[i] = f(s) })
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return fmt.Errorf("%s: %w", h.servers[i].name, err)
		}
	}
	return nil
}

func (s *server) first(ctx context.Context) error {
	if err := s.start(); err != nil {
		return err
	}
	return s.await(ctx, "it is ready", func() bool { return s.ready(s.host) == nil })
}

// start starts the next process of a server: with weir as the slot's next generation.
func (s *server) start() error {
	s.n++
	dir := filepath.Join(s.host.dir, fmt.Sprintf("%s-%d", s.name, s.n))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	argv, err := s.write(dir)
	if err != nil {
		return err
	}
	if s.log != nil {
		s.log.Close()
	}
	if s.log, err = os.Create(filepath.Join(dir, "output")); err != nil {
		return err
	}
	c := lab.Command{Namespace: s.host.name, Path: argv[0], Args: argv[1:], Output: s.log}
	if s.host.weir != nil {
		binary, err := s.host.env.Weir()
		if err != nil {
			return err
		}
		if path, err := lab.Find(argv[0]); err == nil { // sbin may be missing in PATH
			argv[0] = path
		}
		c = lab.Command{Path: binary, Output: s.log, Args: append([]string{"--root", s.host.env.Root, "steer", "run", s.name, "--slot", "0",
			"--replace", "--"}, argv...)}
	}
	s.proc, err = s.host.env.Start(c)
	return err
}

// await waits for a condition, or the end of the server's process.
func (s *server) await(ctx context.Context, what string, is func() bool) error {
	for end := time.Now().Add(startLimit); !is(); {
		if !s.proc.Running() {
			text, _ := os.ReadFile(s.log.Name())
			return fmt.Errorf("generation %d ended: %w: %s", s.n, s.proc.Err(), tail(text))
		}
		if time.Now().After(end) {
			text, _ := os.ReadFile(s.log.Name())
			return fmt.Errorf("generation %d: timeout after %s, waiting until %s: %s", s.n, startLimit, what, tail(text))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
	}
	return nil
}

func tail(text []byte) string { return string(text[max(0, len(text)-600):]) }

// replace starts the next generation beside the current one, and waits for the end of the latter.
func (s *server) replace(ctx context.Context, changed func()) error {
	was, err := s.service.Occupant(0)
	if err != nil {
		return err
	}
	old := s.proc
	if err := s.start(); err != nil {
		return err
	}
	err = s.await(ctx, "it has the slot", func() bool {
		pid, err := s.service.Occupant(0)
		return err == nil && pid != 0 && pid != was
	})
	if err != nil {
		return err
	}
	changed()
	return s.await(ctx, "the previous one has ended", func() bool { return !old.Running() })
}

// restart ends the current process and starts another.
func (s *server) restart(ctx context.Context, changed func()) error {
	changed()
	if err := s.proc.Signal(s.stop); err != nil {
		return err
	}
	select {
	case <-s.proc.Done():
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(startLimit):
		return fmt.Errorf("generation %d did not end by %s", s.n, unix.SignalName(s.stop))
	}
	return s.first(ctx)
}

// reload makes the process read its configuration again.
func (s *server) reload(ctx context.Context, changed func()) error {
	changed()
	if err := s.proc.Signal(unix.SIGHUP); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(400 * time.Millisecond): // the end of a reload is not reported
	}
	return nil
}

// changeAll changes each server n times, all servers at the same time, and records the duration of each
// change.
func (h *host) changeAll(ctx context.Context, way string, n map[string]int, t *tally, l *load) error {
	var mu sync.Mutex
	return h.each(func(s *server) error {
		for range n[s.name] {
			begin := time.Now()
			if begin.After(h.until) {
				return nil // skipped changes are not counted
			}
			changed := func() {
				if s.name == "caddy" {
					mu.Lock()
					t.spanning += l.quic.alive()
					mu.Unlock()
				}
			}
			change := s.restart
			switch {
			case way == byHUP || way == weirHUP:
				change = s.reload
			case h.weir != nil:
				change = s.replace
			}
			if err := change(ctx, changed); err != nil {
				return err
			}
			mu.Lock()
			t.changes[s.name]++
			t.durations[s.name] = append(t.durations[s.name], time.Since(begin))
			mu.Unlock()
		}
		return nil
	})
}

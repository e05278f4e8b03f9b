// SPDX-License-Identifier: Apache-2.0

// Package onehost tests live sessions outliving their processes on one host, with weir's keeper. One test
// is the BMP session of a real router (FRR); its collector keeps the known routes. The other is a stream of
// questions and answers with verification of every byte. The experiment handoff calls [BMP] and [Stream].
package onehost

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/lab"
)

// childArg runs the lab's own binary as a member of a service; see Play.
const childArg = "__onehost"

// Play handles "weir-lab __onehost ROLE ARG…": it turns the process into a member. main and TestMain call
// it first. In any other process it returns.
func Play() {
	if len(os.Args) < 3 || os.Args[1] != childArg {
		return
	}
	roles := map[string]func([]string) error{"bmp": playBMP, "plain": playPlain, "stream": playStream}
	err := errors.New("unknown role")
	if play := roles[os.Args[2]]; play != nil {
		err = play(os.Args[3:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "ERROR:", os.Args[2:], err)
		os.Exit(1)
	}
	os.Exit(0)
}

// sayReady is printed by a member when it accepts sessions.
const sayReady = "ready\n"

// host is the one host: a keeper, and members in a namespace.
type host struct {
	env       *lab.Env
	namespace string
	dir       string
	socket    string // of the keeper
	service   string
	n         int // started processes, for the names of their logs
}

// newHost starts the keeper like a user.
func newHost(ctx context.Context, e *lab.Env, namespace, service string) (*host, error) {
	h := &host{env: e, namespace: namespace, dir: filepath.Join(e.Dir, service), service: service}
	h.socket = filepath.Join(h.dir, "keeper.sock")
	if err := os.MkdirAll(h.dir, 0o755); err != nil {
		return nil, err
	}
	weir, err := e.Weir()
	if err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(h.dir, "keeper.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	k, err := e.Start(lab.Command{Path: weir, Output: log, Args: []string{"--root", e.Root, "serve", "--only", "keeper", "--handoff-socket", h.socket}})
	if err != nil {
		return nil, err
	}
	return h, h.until(ctx, "the keeper answers", func() (bool, error) {
		if !k.Running() {
			return false, fmt.Errorf("the keeper has ended: %w; see %s", k.Err(), log.Name())
		}
		_, err := handoff.Status(ctx, h.socket)
		return err == nil, nil
	})
}

// member is a process of the lab with sessions.
type member struct {
	*lab.Process
	name  string
	ready chan struct{}
}

// start starts a member without waiting for it.
func (h *host) start(role, name string, args ...string) (*member, error) {
	h.n++
	log, err := os.Create(filepath.Join(h.dir, fmt.Sprintf("%s-%s-%d.log", role, name, h.n)))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	m := &member{name: name, ready: make(chan struct{})}
	m.Process, err = h.env.Start(lab.Command{Namespace: h.namespace, Path: h.env.Self(), Args: append([]string{childArg, role}, args...),
		Stdout: &readyWriter{ready: m.ready}, Output: log})
	return m, err
}

// await waits until members are ready.
func (h *host) await(ctx context.Context, all ...*member) error {
	limit := time.After(patience)
	for _, m := range all {
		select {
		case <-m.ready:
		case <-m.Done():
			return fmt.Errorf("member %s has ended: %w; see its log in %s", m.name, m.Err(), h.dir)
		case <-limit:
			return fmt.Errorf("member %s is not ready after %s; see its log in %s", m.name, patience, h.dir)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// readyWriter waits for the first output line of a member.
type readyWriter struct {
	mu    sync.Mutex
	said  strings.Builder
	ready chan struct{}
}

// Write implements io.Writer.
func (w *readyWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.said.Len() < len(sayReady) {
		if w.said.Write(b); strings.HasPrefix(w.said.String(), sayReady) {
			close(w.ready)
		}
	}
	return len(b), nil
}

// kill kills a member by SIGKILL and waits for its end.
func (m *member) kill() error {
	if err := m.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-m.Done()
	return nil
}

// patience is the timeout for immediate events, on a busy machine.
const patience = 60 * time.Second

// until waits for a condition.
func (h *host) until(ctx context.Context, what string, so func() (bool, error)) error {
	return h.every(ctx, time.Millisecond, what, so)
}

// every is like until, for conditions with expensive checks.
func (h *host) every(ctx context.Context, d time.Duration, what string, so func() (bool, error)) error {
	for deadline := time.Now().Add(patience); ; {
		ok, err := so()
		if ok || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("timeout after %s, waiting until %s; see the logs in %s", patience, what, h.dir)
		}
		if err := pause(ctx, d); err != nil {
			return err
		}
	}
}

// pause waits for d, or for the end of the run.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// report returns the keeper's report of the service.
func (h *host) report(ctx context.Context) (handoff.ServiceReport, error) {
	r, err := handoff.Status(ctx, h.socket)
	for _, s := range r.Services {
		if s.Name == h.service {
			return s, err
		}
	}
	return handoff.ServiceReport{}, err
}

// sessions returns the connections at the keeper, only from one address if it is valid.
func (h *host) sessions(ctx context.Context, from netip.Addr) (out []handoff.SessionReport, err error) {
	r, err := h.report(ctx)
	for _, s := range r.Sessions {
		remote, perr := netip.ParseAddrPort(s.Remote)
		if s.Kind == "session" && perr == nil && (!from.IsValid() || remote.Addr().Unmap() == from) {
			out = append(out, s)
		}
	}
	return out, err
}

// onSignal calls f at each signal of this kind.
func onSignal(sig os.Signal, f func()) {
	c := make(chan os.Signal, 16)
	signal.Notify(c, sig)
	go func() {
		for range c {
			f()
		}
	}()
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Collectors register themselves over a socket of its own: everybody may
// connect to it, so it answers that one question and reads nothing to anybody.
// Who asks is taken from the kernel, never from the request.

// Limits on whoever may connect.
const (
	connectionsPerUser = 16 // root is not limited
	registerDefault    = 30 * time.Second
	registerLongest    = 5 * time.Minute
)

// listenRegister makes the socket that collectors register over.
func (h *Host) listenRegister(path string) (net.Listener, error) {
	l, err := bindUnix(path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o666); err != nil {
		l.Close()
		return nil, fmt.Errorf("the socket for collectors: %w", err)
	}
	return &fairListener{Listener: l, open: map[uint32]int{}}, nil
}

func serveRegister(ctx context.Context, l net.Listener, handler http.Handler) error {
	s := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, MaxHeaderBytes: 4096, ConnContext: withPeer}
	s.SetKeepAlivesEnabled(false)
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// registerHandler answers POST /v1/register.
func (h *Host) registerHandler(o ServeOptions) http.Handler {
	mux := http.NewServeMux()
	var refusals rare
	mux.HandleFunc("POST /v1/register", func(w http.ResponseWriter, r *http.Request) {
		peer, ok := r.Context().Value(peerKey{}).(steer.Peer)
		if !ok || peer.PID == 0 {
			http.Error(w, "weir serve cannot see this process: it must run in the initial pid namespace", http.StatusForbidden)
			return
		}
		q, err := readRegistration(w, r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), q.limit)
		defer cancel()
		who := []any{"service", q.service, "slot", q.slot, "pid", peer.PID, "uid", peer.UID}
		if err := steer.RegisterPeer(ctx, h.Root, q.service, q.slot, peer); err != nil {
			if refusals.now() {
				o.Log.Warn("registration failed", append(who, "reason", err)...)
			}
			http.Error(w, err.Error(), registerStatus(err))
			return
		}
		o.Log.Info("registered itself", who...)
		fmt.Fprintln(w, "admitted")
	})
	return mux
}

// registration is what is asked for.
type registration struct {
	service string
	slot    int
	limit   time.Duration
}

func readRegistration(w http.ResponseWriter, r *http.Request) (q registration, err error) {
	c := http.NewResponseController(w)
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return q, err
	}
	r.Body = http.MaxBytesReader(w, r.Body, 4096)
	q = registration{service: r.PostFormValue("service"), limit: registerDefault}
	if q.slot, err = strconv.Atoi(r.PostFormValue("slot")); err != nil || q.service == "" {
		return q, errors.New("want service=NAME&slot=NUMBER")
	}
	if ms, err := strconv.Atoi(r.PostFormValue("timeout_ms")); err == nil && ms > 0 {
		q.limit = min(time.Duration(ms)*time.Millisecond, registerLongest)
	}
	return q, c.SetReadDeadline(time.Time{})
}

// rare lets one message a second through: everybody may make us say it.
type rare struct {
	mu   sync.Mutex
	last time.Time
}

func (r *rare) now() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.last) < time.Second {
		return false
	}
	r.last = time.Now()
	return true
}

func registerStatus(err error) int {
	switch {
	case errors.Is(err, steer.ErrRefused):
		return http.StatusForbidden
	case errors.Is(err, kernel.ErrNotExist), errors.Is(err, steer.ErrNoSlot):
		return http.StatusNotFound
	case errors.Is(err, steer.ErrWithdrawn):
		return http.StatusConflict
	case errors.Is(err, service.ErrNotReady), errors.Is(err, service.ErrNoSocket):
		return http.StatusGatewayTimeout
	}
	return http.StatusUnprocessableEntity
}

// peerKey is the context key of the steer.Peer behind a connection.
type peerKey struct{}

func withPeer(ctx context.Context, c net.Conn) context.Context {
	if f, ok := c.(*fairConn); ok {
		return context.WithValue(ctx, peerKey{}, f.peer)
	}
	return ctx
}

// fairListener keeps one user from taking all of serve's descriptors.
type fairListener struct {
	net.Listener
	mu   sync.Mutex
	open map[uint32]int // connections by user
}

type fairConn struct {
	net.Conn
	peer steer.Peer
	once sync.Once
	done func()
}

// Accept implements net.Listener: a user's connections beyond the limit are
// closed at once.
func (l *fairListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer, err := peerOf(c)
		if err != nil || !l.take(peer.UID) {
			c.Close()
			continue
		}
		return &fairConn{Conn: c, peer: peer, done: func() { l.give(peer.UID) }}, nil
	}
}

func (l *fairListener) take(uid uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if uid != 0 && l.open[uid] >= connectionsPerUser {
		return false
	}
	l.open[uid]++
	return true
}

func (l *fairListener) give(uid uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[uid]--; l.open[uid] == 0 {
		delete(l.open, uid)
	}
}

// Close implements net.Conn.
func (c *fairConn) Close() error {
	c.once.Do(c.done)
	return c.Conn.Close()
}

// peerOf asks the kernel who connected.
func peerOf(c net.Conn) (steer.Peer, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return steer.Peer{}, errors.ErrUnsupported
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return steer.Peer{}, err
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(cerr, err); err != nil {
		return steer.Peer{}, err
	}
	return steer.Peer{PID: int(cred.Pid), UID: cred.Uid}, nil
}

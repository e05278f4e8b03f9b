// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	selfregister "github.com/weir-project/weir/clients/go/register"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// Collectors register themselves through a separate socket. Every user may connect to it, so it answers only this
// request and reveals nothing. The kernel identifies the requester, never the request.

// SocketFlag implements feature.SocketServer.
func (Feature) SocketFlag() feature.SocketFlag {
	return feature.SocketFlag{Name: "register-socket", Usage: "socket for self-registration of collectors", Default: selfregister.DefaultSocket}
}

// Socket implements feature.SocketServer.
func (Feature) Socket(r *kernel.Root, log *slog.Logger, _ feature.Members) feature.Socket {
	return &registerSocket{r, log}
}

// Members implements feature.MemberLister.
func (Feature) Members(r *kernel.Root, name string) ([]service.Member, error) {
	return configuredMembers(r, name)
}

// registerSocket answers registrations.
type registerSocket struct {
	root *kernel.Root
	log  *slog.Logger
}

// Collector implements feature.Socket. There are no metrics.
func (*registerSocket) Collector() prometheus.Collector { return nil }

// Serve implements feature.Socket.
func (s *registerSocket) Serve(ctx context.Context, path string) error {
	l, err := accept.Again(ctx, s.log, path, func() (net.Listener, error) { return listenRegister(path) })
	if err != nil {
		return err
	}
	s.log.Info("accepting self-registrations of collectors", "socket", path)
	return accept.HTTP(ctx, l, s.handler(), accept.Options{Name: "register", PerPeer: connectionsPerUser, Once: true, Log: s.log})
}

// listenRegister creates the registration socket.
func listenRegister(path string) (net.Listener, error) {
	l, err := accept.Unix(path)
	if err != nil {
		return nil, err
	}
	if err := accept.Permit(path, -1, 0o666); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Limits of clients.
const (
	connectionsPerUser = 16 // root has no limit
	registerDefault    = 30 * time.Second
	registerLongest    = 5 * time.Minute
	maxRegistration    = 4096 // of a form, in bytes
)

// handler answers POST /v1/register.
func (s *registerSocket) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/register", func(w http.ResponseWriter, r *http.Request) {
		peer, err := requestPeer(r)
		if err != nil || peer.PID == 0 {
			http.Error(w, "weir serve cannot identify this process: weir serve must run in the initial pid namespace", http.StatusForbidden)
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
		if err := bindings.RegisterPeer(ctx, s.root, q.service, q.slot, peer); err != nil {
			s.log.Warn("registration failed", append(who, "err", err)...)
			http.Error(w, err.Error(), registerStatus(err))
			return
		}
		s.log.Info("collector registered itself", who...)
		fmt.Fprintln(w, "admitted")
	})
	return mux
}

// registration is the content of a request.
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
	r.Body = http.MaxBytesReader(w, r.Body, maxRegistration)
	q = registration{service: r.PostFormValue("service"), limit: registerDefault}
	if q.slot, err = strconv.Atoi(r.PostFormValue("slot")); err != nil || q.service == "" {
		return q, errors.New("want service=NAME&slot=NUMBER")
	}
	if ms, err := strconv.Atoi(r.PostFormValue("timeout_ms")); err == nil && ms > 0 {
		q.limit = time.Duration(min(ms, int(registerLongest.Milliseconds()))) * time.Millisecond // limited first: the product could overflow
	}
	return q, c.SetReadDeadline(time.Time{})
}

func registerStatus(err error) int {
	switch {
	case errors.Is(err, bindings.ErrRefused):
		return http.StatusForbidden
	case errors.Is(err, kernel.ErrNotExist), errors.Is(err, record.ErrNoSlot):
		return http.StatusNotFound
	case errors.Is(err, bindings.ErrWithdrawn):
		return http.StatusConflict
	case errors.Is(err, service.ErrNotReady), errors.Is(err, service.ErrNoSocket):
		return http.StatusGatewayTimeout
	}
	return http.StatusUnprocessableEntity
}

// requestPeer returns the process that sent a request.
func requestPeer(r *http.Request) (peer bindings.Peer, err error) {
	c, ok := accept.ConnFrom(r.Context())
	if !ok {
		return peer, errors.ErrUnsupported
	}
	u, ok := c.Conn.(*net.UnixConn)
	if !ok {
		return peer, errors.ErrUnsupported
	}
	cred, err := accept.Credentials(u)
	if err != nil {
		return peer, err
	}
	return bindings.Peer{PID: int(cred.Pid), UID: cred.Uid}, nil
}

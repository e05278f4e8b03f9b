// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// HTTP serves requests within the limits o until ctx is done. Clients cannot pass descriptors.
// [ConnFrom] returns the client of a request to its handler.
func HTTP(ctx context.Context, l net.Listener, h http.Handler, o Options) error {
	b := New(l, o)
	if err := refuseRights(l); err != nil {
		return err
	}
	if o.Write > 0 {
		h = noBody(h)
	}
	s := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: b.o.Handshake,
		IdleTimeout:       b.o.Idle,
		ReadTimeout:       b.o.Write,
		WriteTimeout:      b.o.Write,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(b.o.Log.Handler(), slog.LevelWarn),
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ConnState: func(c net.Conn, s http.ConnState) {
			switch c := c.(*Conn); s {
			case http.StateActive:
				c.working(busy)
			case http.StateIdle:
				c.working(waiting)
			}
		},
	}
	s.SetKeepAlivesEnabled(!o.Once)
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(b); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

type connKey struct{}

// ConnFrom returns the connection of a request served by [HTTP].
func ConnFrom(ctx context.Context) (*Conn, bool) {
	c, ok := ctx.Value(connKey{}).(*Conn)
	return c, ok
}

// noBody refuses requests with a body without waiting for its end. Listeners with a time limit for
// answers need no bodies.
func noBody(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength == 0 {
			h.ServeHTTP(w, r)
			return
		}
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		defer c.Close()
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = io.WriteString(c, "HTTP/1.1 413 Request Entity Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n") // the client may have closed
	})
}

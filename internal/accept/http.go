// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
)

// HTTP answers requests within o until ctx is done. [PeerOf] tells handlers who asks.
func HTTP(ctx context.Context, l net.Listener, h http.Handler, o Options) error {
	b := New(l, o)
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

// PeerOf is the connection of a request that [HTTP] serves.
func PeerOf(ctx context.Context) (*Conn, bool) {
	c, ok := ctx.Value(connKey{}).(*Conn)
	return c, ok
}

// SPDX-License-Identifier: Apache-2.0

// Package control is how commands ask an agent that runs on this machine: HTTP over a Unix socket, for root alone.
package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// Dir is where agents' sockets are.
const Dir = "/run/weir"

// Path is the socket of an agent of that name.
func Path(name string) string { return filepath.Join(Dir, name+".sock") }

// Listen makes an agent's socket. It is an error while another agent answers there.
func Listen(name string) (net.Listener, error) {
	path := Path(name)
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		return nil, err
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return nil, fmt.Errorf("%s: another agent answers there: end it first", path)
	}
	os.Remove(path) // left by one that was killed
	l, err := net.Listen("unix", path)
	if err == nil {
		err = os.Chmod(path, 0o600)
	}
	return l, err
}

// Serve answers until ctx is done.
func Serve(ctx context.Context, l net.Listener, h http.Handler) error {
	s := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Client asks the agent of that name. Requests go to any host: http://agent/status, say.
func Client(name string) *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", Path(name))
	}}}
}

// SPDX-License-Identifier: Apache-2.0

// Package control connects commands with an agent on this machine: HTTP over a Unix socket, for
// root alone.
package control

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/redial"
	"github.com/weir-project/weir/internal/scrape"
)

// dir is the directory of agents' sockets.
const dir = "/run/weir"

// Path returns the socket path of an agent.
func Path(name string) string { return filepath.Join(dir, name+".sock") }

// Listen creates an agent's socket and removes the sockets of killed agents. It waits briefly for a
// terminating agent ([accept.Again]). It fails while another agent answers at the socket.
func Listen(ctx context.Context, name string, log *slog.Logger) (net.Listener, error) {
	sweep(dir)
	return accept.Again(ctx, log, Path(name), func() (net.Listener, error) { return listen(Path(name)) })
}

func listen(path string) (net.Listener, error) {
	if err := accept.CheckPath(path); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return nil, fmt.Errorf("%s: %w: end that agent first", path, accept.ErrAnswers)
	}
	if err := accept.RemoveStale(path); err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err == nil {
		err = accept.Permit(path, -1, 0o600)
	}
	return l, err
}

// Serve answers requests until ctx is done.
func Serve(ctx context.Context, l net.Listener, h http.Handler, log *slog.Logger) error {
	return accept.HTTP(ctx, l, h, accept.Options{Name: "control", Log: log})
}

// scrapeTime bounds a request to /metrics.
const scrapeTime = 30 * time.Second

// ListenMetrics listens on a TCP address in the network namespace of this thread. The returned
// serve answers scrapes there until its ctx is done. An empty address disables it.
func ListenMetrics(ctx context.Context, address string, c prometheus.Collector, log *slog.Logger) (serve func(ctx context.Context) error, err error) {
	if address == "" {
		return func(context.Context) error { return nil }, nil
	}
	l, err := accept.TCP(ctx, log, address)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return func(ctx context.Context) error {
		return accept.HTTP(ctx, l, scrape.Handler(c), accept.Options{Name: "metrics", Write: scrapeTime, Log: log})
	}, nil
}

// JSON returns a handler that answers with the result of get, or with status 500 and its error.
func JSON[T any](get func() (T, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		v, err := get()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v) // the client may be gone
	}
}

// Client returns an HTTP client of an agent. The host in a URL has no meaning, for example
// http://agent/status.
func Client(name string) *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := redial.Dial(ctx, "unix", Path(name))
		if err != nil {
			return nil, err
		}
		if err := accept.CheckServer(c, Path(name), ""); err != nil {
			c.Close()
			return nil, err
		}
		return c, nil
	}}}
}

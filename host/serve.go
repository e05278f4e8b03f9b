// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/ratelog"
	"github.com/weir-project/weir/internal/scrape"
	"golang.org/x/sync/errgroup"
)

// DefaultSocket is the default socket of weir serve for the group.
const DefaultSocket = "/run/weir/weir.sock"

// scrapeTime is the time limit of a request to /metrics or /healthz.
const scrapeTime = 30 * time.Second

// ServeOptions are the options of weir serve.
type ServeOptions struct {
	Listen string // TCP address of /metrics and /healthz; empty: none
	Socket string // Unix socket for the group; empty: none
	// Sockets are the paths of the features' own Unix sockets ([feature.SocketServer]), by feature. A feature without a
	// path has no socket.
	Sockets map[string]string
	// Keeper is the session keeper's socket if Sockets has none; "" is the default socket.
	Keeper string
	// File is the configuration to apply at the start and at each Reload; empty: serve the applied state.
	File   string
	Reload <-chan struct{}
	// Only are the features to run; empty: all.
	Only []string
	Log  *slog.Logger
}

// Serve runs long-lived tasks until ctx is done: it gives slots to members as they start, and answers queries. Traffic
// does not depend on it.
func (h *Host) Serve(ctx context.Context, o ServeOptions) error {
	err := h.serve(ctx, o)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil // ended as requested, for example while it waited for its predecessor
	}
	return err
}

func (h *Host) serve(ctx context.Context, o ServeOptions) error {
	o.Log = ratelog.Limit(o.Log)
	var f *file
	var config *Config
	if o.File != "" {
		f = &file{path: o.File, only: o.Only, listen: o.Listen, untried: true}
		c, err := f.load()
		if err != nil {
			return err
		}
		config = c
	}
	if len(o.Only) == 0 {
		release, other := h.Root.ClaimServing()
		defer release()
		if other != "" {
			o.Log.Warn("another weir serve uses the same pins, stop one of them", "other", other, "root", h.Root.Path())
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	sockets := h.sockets(o)
	alone := unpinned(o, sockets)
	if f != nil && len(alone) == 0 {
		if err := h.able(); err != nil {
			return err
		}
	}
	for _, s := range alone {
		if err := s.Configure(configured(config)); err != nil {
			return err
		}
	}
	if f != nil {
		f.sockets = alone
		expect(config, sockets)
	}
	metrics := &metricsPort{address: o.Listen, log: o.Log}
	paths := newSocketPaths(o)
	g.Go(func() error { paths.watch(ctx, o.Log); return nil })
	public := h.public(f, o, sockets, metrics, paths)
	if o.Listen != "" {
		g.Go(func() error { return metrics.serve(ctx, public) })
	}
	if o.Socket != "" {
		l, err := accept.Again(ctx, o.Log, o.Socket, func() (net.Listener, error) { return h.listenUnix(o.Socket) })
		if err != nil {
			return err
		}
		o.Log.Info("answering the group", "socket", o.Socket)
		g.Go(func() error {
			return accept.HTTP(ctx, l, h.group(public), accept.Options{Name: "group", Log: o.Log})
		})
		g.Go(func() error { h.followGroup(ctx, o.Socket, o.Log); return nil })
	}
	for name, x := range sockets {
		g.Go(func() error { return x.Serve(ctx, o.Sockets[name]) })
	}
	if len(alone) == 0 {
		g.Go(func() error { h.sweepRecords(ctx); return nil })
		g.Go(func() error { return h.watchHealth(ctx, o.Log) })
		g.Go(func() error { return h.watchConfirmation(ctx, o.Log) })
	}
	if f != nil {
		g.Go(func() error { return f.follow(ctx, h, config, o.Reload, o.Log) })
	}
	for _, f := range featuresOnly(o.Only) {
		if r := o.runner(f); r != nil {
			g.Go(func() error { return r.Run(ctx, h.Root, o.Log) })
		}
	}
	return g.Wait()
}

// listenUnix creates the socket for the group with read access to the pins.
func (h *Host) listenUnix(path string) (net.Listener, error) {
	l, err := accept.Unix(path)
	if err != nil {
		return nil, err
	}
	gid, _ := h.Root.Group()
	if err := permit(path, gid); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// public serves /metrics and /healthz, all that the open TCP port serves. A weir serve with a file and without pins
// reports nothing about pins.
func (h *Host) public(f *file, o ServeOptions, sockets map[string]feature.Socket, metrics *metricsPort, paths *socketPaths) http.Handler {
	alone := len(unpinned(o, sockets)) > 0
	all := []prometheus.Collector{collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})}
	for _, x := range sockets {
		if c := x.Collector(); c != nil {
			all = append(all, c)
		}
	}
	if !alone {
		all = append(all, healthCollector{health{h, f, metrics, paths}})
	}
	for _, f := range featuresOnly(o.Only) {
		if m, ok := f.Value.(feature.Measured); ok && !alone {
			all = append(all, m.Collector(h.Root))
		}
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", scrape.Handler(all...))
	mux.Handle("GET /healthz", scrape.Shared(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := errors.Join(f.failure(), metrics.failure(), paths.failure())
		if !alone {
			_, err = health{h, f, metrics, paths}.check(r.Context())
		}
		if err != nil {
			http.Error(w, printable.Lines(err.Error()), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})))
	return mux
}

// group answers the reading commands of users without access to the pins, and serves everything of public. It shows
// PIDs, devices and hash seeds: use it only for the group's Unix socket.
func (h *Host) group(public http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /", public)
	each := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Connection", "close") // a member of a former group must connect again, and cannot
		mux.ServeHTTP(w, r)
	})
	direct := pins{h}
	answer := func(path string, f func(*http.Request) (any, error)) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			v, err := f(r)
			if err != nil {
				http.Error(w, printable.Lines(err.Error()), http.StatusUnprocessableEntity)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			json.NewEncoder(w).Encode(v)
		})
	}
	answer("/v1/status", func(r *http.Request) (any, error) { return direct.Status(r.Context()) })
	answer("/v1/faults", func(r *http.Request) (any, error) { return direct.Faults(r.Context()) })
	for _, f := range features {
		for _, query := range append([]feature.Query{{Name: feature.StatusQuery}}, f.Queries()...) {
			answer("/v1/"+f.Name+"/"+query.Name, func(r *http.Request) (any, error) {
				if err := r.ParseForm(); err != nil {
					return nil, err
				}
				return direct.answer(r.Context(), f.Name, query.Name, r.Form)
			})
		}
	}
	return each
}

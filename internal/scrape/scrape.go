// SPDX-License-Identifier: Apache-2.0

// Package scrape serves scrapes of metrics. Concurrent scrapes share one collection at a time.
// Labels chosen by strangers never make a scrape fail.
package scrape

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Handler serves the metrics of collectors.
func Handler(all ...prometheus.Collector) http.Handler {
	reg := prometheus.NewRegistry()
	dropped := &droppedCounter{}
	reg.MustRegister(dropped)
	for _, c := range all {
		reg.MustRegister(&bounded{Collector: c, dropped: dropped})
	}
	return Shared(promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, DisableCompression: true}))
}

// restFactor and longestRest limit the rest after a collection: a multiple of its duration, and an
// upper bound.
const (
	restFactor  = 3
	longestRest = 2 * time.Second
)

// Shared is a handler for strangers with the same answer for all. All waiting clients get one
// answer, from a run begun after their requests. After a run it rests for three times the run's
// duration, so requests take at most a quarter of a CPU.
func Shared(h http.Handler) http.Handler { return &shared{collect: h} }

type shared struct {
	collect http.Handler

	mu   sync.Mutex // lock it after run
	next *answer
	run  sync.Mutex // held while collecting
	rest time.Time  // the next run begins no earlier; guarded by run
}

type answer struct {
	once   sync.Once
	status int
	header http.Header
	body   bytes.Buffer
}

// ServeHTTP implements http.Handler.
func (s *shared) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	if s.next == nil {
		s.next = &answer{status: http.StatusOK, header: http.Header{}}
	}
	a := s.next
	s.mu.Unlock()
	a.once.Do(func() {
		s.run.Lock()
		defer s.run.Unlock()
		time.Sleep(time.Until(s.rest))
		s.mu.Lock()
		s.next = nil // later requests need a newer collection
		s.mu.Unlock()
		plain := r.Clone(context.WithoutCancel(r.Context())) // others wait for the answer, too
		plain.Header = http.Header{}
		began := time.Now()
		s.collect.ServeHTTP(a, plain)
		end := time.Now()
		s.rest = end.Add(min(restFactor*end.Sub(began), longestRest))
	})
	h := w.Header()
	for k, v := range a.header {
		h[k] = v
	}
	h.Set("Content-Length", fmt.Sprint(a.body.Len()))
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body.Bytes()) // the client may have closed
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header { return a.header }

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(status int) { a.status = status }

// Write implements http.ResponseWriter.
func (a *answer) Write(b []byte) (int, error) { return a.body.Write(b) }

// SPDX-License-Identifier: Apache-2.0

// Package scrape answers scrapes of metrics. One collection runs at a time, however
// many ask, and no label that a stranger chose makes a scrape fail.
package scrape

import (
	"bytes"
	"fmt"
	"net/http"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Handler answers with the metrics of collectors.
func Handler(all ...prometheus.Collector) http.Handler {
	reg := prometheus.NewRegistry()
	dropped := &droppedCounter{}
	reg.MustRegister(dropped)
	for _, c := range all {
		reg.MustRegister(&bounded{Collector: c, dropped: dropped})
	}
	return &shared{collect: promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, DisableCompression: true})}
}

// shared gives all who wait the answer of one collection, which began after they asked.
type shared struct {
	collect http.Handler

	mu   sync.Mutex
	next *answer
	run  sync.Mutex // held while collecting
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
		s.mu.Lock()
		s.next = nil // who asks from here on wants to see what changes from here on
		s.mu.Unlock()
		plain := r.Clone(r.Context())
		plain.Header = http.Header{}
		s.collect.ServeHTTP(a, plain)
	})
	h := w.Header()
	for k, v := range a.header {
		h[k] = v
	}
	h.Set("Content-Length", fmt.Sprint(a.body.Len()))
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body.Bytes()) // who has asked may have gone
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header { return a.header }

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(status int) { a.status = status }

// Write implements http.ResponseWriter.
func (a *answer) Write(b []byte) (int, error) { return a.body.Write(b) }

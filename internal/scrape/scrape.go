// SPDX-License-Identifier: Apache-2.0

// Package scrape answers scrapes of metrics. One collection runs at a time, however
// many ask, and no label that a stranger chose makes a scrape fail.
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

// Handler answers with the metrics of collectors.
func Handler(all ...prometheus.Collector) http.Handler {
	reg := prometheus.NewRegistry()
	dropped := &droppedCounter{}
	reg.MustRegister(dropped)
	for _, c := range all {
		reg.MustRegister(&bounded{Collector: c, dropped: dropped})
	}
	return Shared(promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, DisableCompression: true}))
}

// restFactor and longestRest bound the rest after a collection, in times of its length and in all.
const (
	restFactor  = 3
	longestRest = 2 * time.Second
)

// Shared is a handler for strangers, whose answer is the same for all: everybody who waits gets one answer, of a run that began
// after they asked. A run is followed by a rest of three times its length, so that requests take a quarter of a CPU at most.
func Shared(h http.Handler) http.Handler { return &shared{collect: h} }

type shared struct {
	collect http.Handler

	mu   sync.Mutex // after run
	next *answer
	run  sync.Mutex // held while collecting
	rest time.Time  // no run begins before; of run
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
		s.next = nil // who asks from here on wants to see what changes from here on
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
	_, _ = w.Write(a.body.Bytes()) // who has asked may have gone
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header { return a.header }

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(status int) { a.status = status }

// Write implements http.ResponseWriter.
func (a *answer) Write(b []byte) (int, error) { return a.body.Write(b) }

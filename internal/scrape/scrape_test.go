// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

var desc = prometheus.NewDesc("weir_test", "A test.", []string{"name"}, nil)

// named is a collector with one series per name.
type named struct {
	names   []string
	collect func()
	runs    atomic.Int32
	inside  atomic.Int32
}

func (*named) Describe(ch chan<- *prometheus.Desc) { ch <- desc }

func (n *named) Collect(ch chan<- prometheus.Metric) {
	n.runs.Add(1)
	if n.inside.Add(1) > 1 {
		panic("two collections at once")
	}
	defer n.inside.Add(-1)
	if n.collect != nil {
		n.collect()
	}
	for _, s := range n.names {
		ch <- Const(desc, prometheus.GaugeValue, 1, s)
	}
}

func scrape(t *testing.T, h http.Handler) string {
	t.Helper()
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	r.Header.Set("Accept-Encoding", "gzip")
	h.ServeHTTP(w, r)
	if w.Code != http.StatusOK {
		t.Errorf("status %d: %.200s", w.Code, w.Body)
	}
	return w.Body.String()
}

// TestLabelsOfStrangers checks that no label makes a scrape fail, and equal escaped labels become
// one series.
func TestLabelsOfStrangers(t *testing.T) {
	h := Handler(&named{names: []string{"\xff", `\xff`, "\xff", "a\nb", "\x1b[31m", "\u202e", strings.Repeat("x", 1000), strings.Repeat("x", 1001), "good"}})
	body := scrape(t, h)
	for _, want := range []string{`name="\\xff"`, `name="a\\nb"`, `name="\\u001b[31m"`, `name="\\u202e"`, `name="good"`} {
		if !strings.Contains(body, want) {
			t.Errorf("no %s in\n%s", want, body)
		}
	}
	if n := strings.Count(body, "weir_test{"); n != 7 {
		t.Errorf("%d series\n%s", n, body)
	}
	for line := range strings.Lines(body) {
		if len(line) > maxLabel+50 && !strings.HasPrefix(line, "#") {
			t.Errorf("%d bytes: %s", len(line), line)
		}
	}
	if body = scrape(t, h); !strings.Contains(body, "weir_metrics_dropped_total 2\n") && !strings.Contains(body, "weir_metrics_dropped_total 4\n") {
		t.Errorf("series left out are not counted:\n%s", body)
	}
}

// raw creates metrics without Const.
type raw struct{ *named }

func (r raw) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, 1, r.names[0])
}

// TestPanicOfCollector checks that a panicking collector loses only its own metrics.
func TestPanicOfCollector(t *testing.T) {
	h := Handler(raw{&named{names: []string{"\xff"}}}, collectors.NewGoCollector())
	if body := scrape(t, h); !strings.Contains(body, "go_goroutines") {
		t.Error(body)
	}
}

func TestSeriesAreBounded(t *testing.T) {
	n := &named{}
	for i := range maxSeries + 500 {
		n.names = append(n.names, fmt.Sprint(i))
	}
	if got := strings.Count(scrape(t, Handler(n)), "weir_test{"); got != maxSeries {
		t.Errorf("%d series", got)
	}
}

// TestScrapesShareCollections checks that all requests during a collection share the next one.
func TestScrapesShareCollections(t *testing.T) {
	began, release := make(chan struct{}, 1), make(chan struct{})
	n := &named{names: []string{"a"}}
	n.collect = func() {
		select {
		case began <- struct{}{}:
			<-release
		default:
		}
	}
	h := Handler(n)
	var wg sync.WaitGroup
	wg.Go(func() { scrape(t, h) })
	<-began
	var asked atomic.Int32
	for range 100 {
		wg.Go(func() { asked.Add(1); scrape(t, h) })
	}
	for asked.Load() < 100 {
	}
	close(release)
	wg.Wait()
	if runs := n.runs.Load(); runs > 50 {
		t.Errorf("%d collections for 101 scrapes", runs)
	}
	n.names = []string{"b"}
	if !strings.Contains(scrape(t, h), `name="b"`) {
		t.Error("an old answer")
	}
}

// TestRunsRest checks that successive requests take at most a quarter of the time. An early close
// by a client does not spoil the answer of others.
func TestRunsRest(t *testing.T) {
	const takes = 20 * time.Millisecond
	var spent time.Duration
	h := Shared(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		time.Sleep(takes)
		if err := r.Context().Err(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
		spent += time.Since(began)
	}))
	began := time.Now()
	for i := range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		if i%2 == 0 {
			cancel()
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/healthz", nil))
		cancel()
		if w.Code != http.StatusOK {
			t.Errorf("request %d: %d %s", i, w.Code, w.Body)
		}
	}
	// The rest after the last run is still to come.
	if all := time.Since(began); all < 3*spent {
		t.Errorf("runs took %v of %v", spent, all)
	}
}

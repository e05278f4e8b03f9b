// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/weir-project/weir/internal/printable"
)

const (
	maxSeries = 10_000 // per metric
	maxLabel  = 256    // bytes
)

var droppedDesc = prometheus.NewDesc("weir_metrics_dropped_total", "Series omitted from scrapes: over 10,000 of one metric, or duplicates.", nil, nil)

type droppedCounter struct{ n atomic.Uint64 }

// Describe implements prometheus.Collector.
func (*droppedCounter) Describe(ch chan<- *prometheus.Desc) { ch <- droppedDesc }

// Collect implements prometheus.Collector.
func (d *droppedCounter) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(d.n.Load()))
}

// Const is prometheus.MustNewConstMetric with escaped labels. Unescaped invalid UTF-8 would make it
// panic.
func Const(desc *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) prometheus.Metric {
	out := make([]string, len(labels))
	for i, l := range labels {
		out[i] = printable.Bounded(l, maxLabel)
	}
	return prometheus.MustNewConstMetric(desc, t, v, out...)
}

// bounded makes labels valid UTF-8 of limited length, and limits the series per metric.
type bounded struct {
	prometheus.Collector
	dropped *droppedCounter
}

// Collect implements prometheus.Collector.
func (b *bounded) Collect(ch chan<- prometheus.Metric) {
	in := make(chan prometheus.Metric)
	go func() {
		defer close(in)
		defer func() {
			if p := recover(); p != nil { // a failing collector does not end the process
				in <- prometheus.NewInvalidMetric(droppedDesc, fmt.Errorf("collecting: %v", p))
			}
		}()
		b.Collector.Collect(in)
	}()
	series := map[*prometheus.Desc]map[string]bool{}
	for m := range in {
		x := &metric{desc: m.Desc(), dto: &dto.Metric{}}
		if err := m.Write(x.dto); err != nil {
			ch <- m // the registry reports its error
			continue
		}
		seen := series[x.desc]
		if seen == nil {
			seen = map[string]bool{}
			series[x.desc] = seen
		}
		key := x.harmless()
		if seen[key] || len(seen) >= maxSeries {
			b.dropped.n.Add(1)
			continue
		}
		seen[key] = true
		ch <- x
	}
}

// metric is a metric with escaped labels.
type metric struct {
	desc *prometheus.Desc
	dto  *dto.Metric
}

// harmless escapes the labels and returns all of them as one string.
func (m *metric) harmless() string {
	var key strings.Builder
	for i, l := range m.dto.Label {
		if v := printable.Bounded(l.GetValue(), maxLabel); v != l.GetValue() {
			m.dto.Label[i] = &dto.LabelPair{Name: l.Name, Value: &v} // the pair may be shared
		}
		key.WriteString(m.dto.Label[i].GetValue())
		key.WriteByte(0)
	}
	return key.String()
}

// Desc implements prometheus.Metric.
func (m *metric) Desc() *prometheus.Desc { return m.desc }

// Write implements prometheus.Metric.
func (m *metric) Write(out *dto.Metric) error {
	out.Label, out.Gauge, out.Counter, out.Summary = m.dto.Label, m.dto.Gauge, m.dto.Counter, m.dto.Summary
	out.Untyped, out.Histogram, out.TimestampMs = m.dto.Untyped, m.dto.Histogram, m.dto.TimestampMs
	return nil
}

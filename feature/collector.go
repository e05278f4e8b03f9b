// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/weir-project/weir/internal/scrape"
	"github.com/weir-project/weir/kernel"
)

// Collector implements Measured: it exports metrics from the tags of V. A field tagged `label:"NAME"` is a label of each
// metric of the item. A field tagged `metric:"NAME" help:"TEXT"` is the metric weir_FEATURE_NAME: a counter if NAME ends
// in _total, else a gauge. Fields are numbers, bools (1 or 0), durations (seconds) and times (seconds since the epoch;
// NAME ends in _timestamp_seconds). weir_FEATURE_up is 0 if the pins are unreadable. A scrape never fails.
func (s Set[I, V]) Collector(r *kernel.Root) prometheus.Collector {
	c := &tagged{up: prometheus.NewDesc("weir_"+s.Name()+"_up", "Whether the pins could be read.", nil, nil),
		items: func() (out []reflect.Value, err error) {
			st, err := s.State(context.Background(), r)
			for _, v := range st.Items {
				out = append(out, reflect.ValueOf(v))
			}
			return out, errors.Join(err, st.unreadable.Err())
		}}
	row := reflect.TypeFor[V]()
	var names []string
	for i := range row.NumField() {
		if name := row.Field(i).Tag.Get("label"); name != "" {
			names, c.labels = append(names, name), append(c.labels, i)
		}
	}
	for i := range row.NumField() {
		f := row.Field(i)
		name := f.Tag.Get("metric")
		if name == "" {
			continue
		}
		kind := prometheus.GaugeValue
		if strings.HasSuffix(name, "_total") {
			kind = prometheus.CounterValue
		}
		c.metrics = append(c.metrics, taggedMetric{i, kind, prometheus.NewDesc("weir_"+s.Name()+"_"+name, f.Tag.Get("help"), names, nil)})
	}
	return c
}

// tagged collects the tagged fields of items.
type tagged struct {
	up      *prometheus.Desc
	labels  []int // field numbers
	metrics []taggedMetric
	items   func() ([]reflect.Value, error)
}

type taggedMetric struct {
	field int
	kind  prometheus.ValueType
	desc  *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *tagged) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.up
	for _, m := range c.metrics {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *tagged) Collect(ch chan<- prometheus.Metric) {
	items, err := c.items()
	ch <- scrape.Const(c.up, prometheus.GaugeValue, Gauge(err == nil))
	var once Once
	for _, item := range items {
		var labels []string
		for _, f := range c.labels {
			labels = append(labels, fmt.Sprint(item.Field(f).Interface()))
		}
		if !once.First(labels...) {
			continue
		}
		for _, m := range c.metrics {
			ch <- scrape.Const(m.desc, m.kind, number(item.Field(m.field)), labels...)
		}
	}
}

// number returns the value of a metric's field.
func number(v reflect.Value) float64 {
	switch x := v.Interface().(type) {
	case bool:
		return Gauge(x)
	case time.Duration:
		return x.Seconds()
	case time.Time:
		return float64(x.UnixNano()) / 1e9
	}
	switch {
	case v.CanInt():
		return float64(v.Int())
	case v.CanUint():
		return float64(v.Uint())
	}
	return v.Float()
}

// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/scrape"
	"github.com/weir-project/weir/kernel"
)

var (
	_ feature.Measured  = Feature{}
	_ feature.Recoverer = Feature{}
	_ feature.Examiner  = Feature{}
)

// collector reads the pins for every scrape and keeps no state.
type collector struct{ root *kernel.Root }

// Collector implements feature.Measured.
func (Feature) Collector(r *kernel.Root) prometheus.Collector { return collector{r} }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weir_filter_"+name, help, append([]string{"filter", "netns"}, labels...), nil)
}

var (
	packetsDesc    = desc("packets_total", "Packets matched by a rule; rule \"\" is the default.", "hook", "rule", "action")
	bytesDesc      = desc("bytes_total", "Bytes of the packets matched by a rule, as seen by the hook.", "hook", "rule", "action")
	lastDesc       = desc("last_match_timestamp_seconds", "Time of a rule's last match, seconds since the Unix epoch.", "hook", "rule", "action")
	unreadableDesc = desc("unreadable_packets_total", "Packets with an unreadable transport header used by a rule.", "hook")
	attachedDesc   = desc("attached", "1 if the filter is attached at the place, else 0.", "place")
	upDesc         = prometheus.NewDesc("weir_filter_up", "1 if all pins were readable, else 0.", nil, nil)
)

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{packetsDesc, bytesDesc, lastDesc, unreadableDesc, attachedDesc, upDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	st, err := ReadState(context.Background(), c.root)
	ch <- scrape.Const(upDesc, prometheus.GaugeValue, feature.Gauge(err == nil && len(st.Unreadable) == 0))
	var once feature.Once
	for _, f := range st.Filters {
		if f.gone || !once.First(f.Name, f.Netns) {
			continue
		}
		send := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
			ch <- scrape.Const(d, t, v, append([]string{f.Name, f.Netns}, labels...)...)
		}
		for _, p := range f.Attachments {
			send(attachedDesc, prometheus.GaugeValue, feature.Gauge(p.Attached), p.Name)
		}
		send(unreadableDesc, prometheus.CounterValue, float64(f.Unreadable.Packets), string(f.Hook))
		for _, r := range append(f.Rules[:len(f.Rules):len(f.Rules)], f.Default) {
			labels := []string{string(f.Hook), r.Key(), string(r.Action)}
			send(packetsDesc, prometheus.CounterValue, float64(r.Packets), labels...)
			send(bytesDesc, prometheus.CounterValue, float64(r.Bytes), labels...)
			if !r.Last.IsZero() {
				send(lastDesc, prometheus.GaugeValue, float64(r.Last.UnixMilli())/1000, labels...)
			}
		}
	}
}

// Failures implements feature.Failing: filters with missing or outdated attachments. A wrong order
// among programs is no failure. Filters of removed namespaces are no failures: weir serve removes
// them.
func (st State) Failures() (out []feature.Finding) {
	for _, f := range st.Filters {
		if f.Problem != "" && f.Problem != problemUnseen && !f.gone {
			out = append(out, feature.Failure(f.Name, f.Problem, ""))
		}
		for _, p := range f.Attachments {
			if p.Problem != "" && p.Problem != problemUnseen && !p.misplaced {
				out = append(out, feature.Failure(f.Name, p.Name+": "+p.Problem, ""))
			}
		}
	}
	return out
}

// Examine implements feature.Examiner. It reports failures, wrong orders, removed namespaces and
// outdated programs.
func (Feature) Examine(ctx context.Context, r *kernel.Root) ([]feature.Finding, error) {
	st, err := ReadState(ctx, r)
	out := st.Failures()
	for _, f := range st.Filters {
		if f.gone {
			out = append(out, feature.Finding{Object: f.Name, Text: f.Problem})
		}
		for _, p := range f.Attachments {
			if p.misplaced {
				out = append(out, feature.Finding{Object: f.Name, Text: p.Name + ": " + p.Problem})
			}
		}
		if f.outdated() {
			out = append(out, feature.Finding{Object: f.Name, Text: fmt.Sprintf("program compiled by another weir, version %s", f.pub.meta.Version),
				Remedy: "weir upgrade, or weir apply, recompiles it without missing a packet"})
		}
	}
	return append(out, feature.UnreadFindings(st.Unreadable)...), err
}

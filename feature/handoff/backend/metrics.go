// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/internal/scrape"
	"github.com/weir-project/weir/kernel"
)

// Collector implements feature.Measured: the metrics of this network namespace's backend, from its agent.
func (Feature) Collector(r *kernel.Root) prometheus.Collector { return collector{r} }

type collector struct{ root *kernel.Root }

var (
	descMoved      = desc("moved_total", "moved sessions", "direction")
	descBack       = desc("came_back_total", "moves that ended at their source")
	descCalled     = desc("discarded_total", "abandoned arrivals")
	descBytes      = desc("bytes_total", "bytes of sessions sent to other backends")
	descRefused    = desc("refused_total", "failed steps of moves", "step")
	descMoving     = desc("moving", "sessions under way", "direction")
	descTransfer   = desc("transfer_seconds", "duration of the latest moves from here, from the member's release until the other backend has the session")
	descStop       = desc("stopped_seconds", "duration of packet blocking in the latest moves from here")
	descQuarantine = desc("quarantine_packets_total", "packets affected by the quarantine", "what")
	descExpires    = desc("certificate_expires_timestamp_seconds", "when the agent's certificate expires")
	descUnread     = desc("certificate_refused", "1: the changed files of the agent's certificate are rejected")
	descAgent      = desc("agent_up", "1: the agent answers")
	descLink       = desc("connected", "whether an agent is connected", "agent")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weir_backend_"+name, help, labels, nil)
}

func (c collector) Describe(out chan<- *prometheus.Desc) { describe(out) }

func describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descMoved, descBack, descCalled, descBytes, descRefused, descMoving, descTransfer, descStop, descQuarantine, descExpires, descUnread, descAgent, descLink} {
		out <- d
	}
}

func (c collector) Collect(out chan<- prometheus.Metric) {
	if spec, err := applied.Read(c.root); err == nil && spec == nil {
		return // not a backend
	}
	s, err := StatusHere(context.Background())
	out <- scrape.Const(descAgent, prometheus.GaugeValue, float64(bit(err == nil)))
	if err != nil {
		return
	}
	count := func(d *prometheus.Desc, n uint64, labels ...string) {
		out <- scrape.Const(d, prometheus.CounterValue, float64(n), labels...)
	}
	gauge := func(d *prometheus.Desc, n float64, labels ...string) {
		out <- scrape.Const(d, prometheus.GaugeValue, n, labels...)
	}
	count(descMoved, s.Out, "out")
	count(descMoved, s.In, "in")
	count(descBack, s.Returned)
	count(descCalled, s.Discarded)
	count(descBytes, s.Bytes)
	for what, n := range s.Rejected {
		count(descRefused, n, what)
	}
	gauge(descMoving, float64(s.Sending), "out")
	gauge(descMoving, float64(s.Receiving), "in")
	for d, times := range map[*prometheus.Desc]Times{descTransfer: s.Transfer, descStop: s.Stopped} {
		out <- prometheus.MustNewConstSummary(d, times.Count, times.Sum.Seconds(), map[float64]float64{0.5: times.P50.Seconds(), 0.99: times.P99.Seconds(), 1: times.Max.Seconds()})
	}
	count(descQuarantine, s.Quarantine.Returned, "returned")
	count(descQuarantine, s.Quarantine.Deaf, "too_late")
	count(descQuarantine, s.Quarantine.Buffered, "buffered")
	count(descQuarantine, s.Quarantine.Mute, "mute")
	if c := s.Certificate; c != nil {
		gauge(descExpires, float64(c.NotAfter.Unix()))
		gauge(descUnread, float64(bit(c.Problem != "")))
	}
	gauge(descLink, float64(bit(s.LB)), "load balancer")
	for name, there := range s.Peers {
		gauge(descLink, float64(bit(there)), name)
	}
}

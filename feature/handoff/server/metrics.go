// SPDX-License-Identifier: Apache-2.0

package server

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/internal/scrape"
)

// collector is the metrics of an agent.
type collector struct{ a *Agent }

// Collector gives the agent's metrics, weir_handoff_server_….
func (a *Agent) Collector() prometheus.Collector { return collector{a} }

var (
	descMoved    = desc("moved_total", "sessions that have moved", "direction")
	descBack     = desc("came_back_total", "moves that ended where they began")
	descCalled   = desc("discarded_total", "arrivals that were called off")
	descBytes    = desc("bytes_total", "bytes of sessions sent to other servers")
	descRefused  = desc("refused_total", "steps of moves that could not be done", "step")
	descMoving   = desc("moving", "sessions on their way", "direction")
	descTransfer = desc("transfer_seconds", "of the latest moves from here: from the member's letting go until the other server has the session")
	descStop     = desc("stopped_seconds", "of the latest moves from here: while the session's packets were stopped")
	descGate     = desc("gate_packets_total", "packets that the gate kept from going on", "what")
	descExpires  = desc("certificate_expires_seconds", "when the agent's certificate expires, in seconds since 1970")
	descUnread   = desc("certificate_refused", "1: the files of the agent's certificate have changed, and are not used")
	descLink     = desc("connected", "whether an agent is connected", "agent")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weir_handoff_server_"+name, help, labels, nil)
}

func (c collector) Describe(out chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, out) }

func (c collector) Collect(out chan<- prometheus.Metric) {
	s, err := c.a.Status()
	if err != nil {
		out <- prometheus.NewInvalidMetric(descMoved, err)
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
	count(descBack, s.Back)
	count(descCalled, s.Discarded)
	count(descBytes, s.Bytes)
	for what, n := range s.Refused {
		count(descRefused, n, what)
	}
	gauge(descMoving, float64(s.Leaving), "out")
	gauge(descMoving, float64(s.Arriving), "in")
	for d, times := range map[*prometheus.Desc]Times{descTransfer: s.Transfer, descStop: s.Stopped} {
		out <- prometheus.MustNewConstSummary(d, times.Count, times.Sum.Seconds(), map[float64]float64{0.5: times.P50.Seconds(), 0.99: times.P99.Seconds(), 1: times.Max.Seconds()})
	}
	count(descGate, s.Gate.Returned, "returned")
	count(descGate, s.Gate.Deaf, "too_late")
	count(descGate, s.Gate.Parked, "parked")
	count(descGate, s.Gate.Mute, "mute")
	if c := s.Certificate; c != nil {
		gauge(descExpires, float64(c.NotAfter.Unix()))
		gauge(descUnread, float64(bit(c.Problem != "")))
	}
	gauge(descLink, float64(bit(s.Front)), "front end")
	for name, there := range s.Peers {
		gauge(descLink, float64(bit(there)), name)
	}
}

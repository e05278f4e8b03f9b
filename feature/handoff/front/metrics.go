// SPDX-License-Identifier: Apache-2.0

package front

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/internal/scrape"
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weir_handoff_front_"+name, help, labels, nil)
}

var (
	flowsDesc   = desc("flows", "Flows that the front end knows, by the host that owns them.", "host")
	parkedDesc  = desc("parked_flows", "Flows whose packets wait.")
	movingDesc  = desc("moving_flows", "Flows that are being moved.")
	upDesc      = desc("host_up", "1: the host gets new flows, its weight permitting.", "host")
	weightDesc  = desc("host_weight", "The host's share of new flows.", "host")
	loadDesc    = desc("host_load", "What waits for the least busy member of a service at the host, in the service's own unit.", "host", "service")
	packetsDesc = desc("packets_total", "Packets, by what became of them.", "verdict")
	learnedDesc = desc("flows_learned_total", "Flows that became known.")
	failedDesc  = desc("status_failed", "1: the data path could not be read.")
)

func (s Seen) label() string {
	if s.Name == "" {
		return fmt.Sprint(s.Number)
	}
	return s.Name
}

// Collector has the front end's metrics.
func (a *Agent) Collector() prometheus.Collector { return collector{a} }

type collector struct{ a *Agent }

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{flowsDesc, parkedDesc, movingDesc, upDesc, weightDesc, loadDesc, packetsDesc, learnedDesc, failedDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- scrape.Const(d, prometheus.GaugeValue, v, labels...)
	}
	s, err := c.a.Status()
	if err != nil {
		gauge(failedDesc, 1)
		return
	}
	gauge(failedDesc, 0)
	gauge(parkedDesc, float64(s.Parked))
	gauge(movingDesc, float64(s.Moving))
	for _, h := range s.Hosts {
		gauge(flowsDesc, float64(h.Flows), h.label())
		gauge(weightDesc, float64(h.Weight), h.label())
		up := 0.0
		if h.Up {
			up = 1
		}
		gauge(upDesc, up, h.label())
		for service, n := range h.Loads {
			gauge(loadDesc, float64(n), h.label(), service)
		}
	}
	n := s.Counts
	ch <- scrape.Const(learnedDesc, prometheus.CounterValue, float64(n.Learned))
	for verdict, v := range map[string]uint64{"to_host": n.In, "to_client": n.Out, "parked": n.Held, "late": n.Late, "icmp_error": n.ICMP,
		"too_big": n.Big, "dropped_other_owner": n.Mute, "dropped_reset": n.NoReset, "dropped_no_host": n.NoHost, "dropped_stranger": n.Stranger,
		"dropped_fragment": n.Fragment, "dropped_awaited": n.Awaited, "unlearned": n.Full} {
		ch <- scrape.Const(packetsDesc, prometheus.CounterValue, float64(v), verdict)
	}
}

// SPDX-License-Identifier: Apache-2.0

package front

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/feature"
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
	settleDesc  = desc("settling", "1: packets of unknown connections wait for the hosts to say which are theirs.")
	pairDesc    = desc("partner_connected", "1: the other front end is heard.")
	carriesDesc = desc("partner_carries", "1: clients' packets come by that front end.", "front")
	apartDesc   = desc("partner_apart", "1: clients' packets come by here, the partner is not heard, and agents of hosts that were there are not here.")
	toldDesc    = desc("partner_flows_total", "Flows told to the other front end, and heard from it.", "direction")
	splitDesc   = desc("partner_split_seconds_total", "Time in which both front ends carried clients' packets, or were apart.")
	splitLoss   = desc("partner_split_dropped_packets_total", "Packets dropped meanwhile, of flows that are not where this front end knows them.")
	expiresDesc = desc("certificate_expires_seconds", "When the agent's certificate expires, in seconds since 1970.")
	unreadDesc  = desc("certificate_refused", "1: the files of the agent's certificate have changed, and are not used.")
	failedDesc  = desc("status_failed", "1: the data path could not be read.")
)

func (s Seen) label() string {
	if s.Name == "" {
		return fmt.Sprint(s.Number)
	}
	return s.Name
}

func oneIf(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// Collector has the front end's metrics.
func (a *Agent) Collector() prometheus.Collector { return collector{a} }

type collector struct{ a *Agent }

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{flowsDesc, parkedDesc, movingDesc, upDesc, weightDesc, loadDesc, packetsDesc, learnedDesc, failedDesc,
		settleDesc, pairDesc, carriesDesc, apartDesc, toldDesc, splitDesc, splitLoss, expiresDesc, unreadDesc} {
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
	if c := s.Certificate; c != nil {
		gauge(expiresDesc, float64(c.NotAfter.Unix()))
		gauge(unreadDesc, feature.Gauge(c.Problem != ""))
	}
	gauge(parkedDesc, float64(s.Parked))
	gauge(movingDesc, float64(s.Moving))
	gauge(settleDesc, oneIf(s.Settling))
	if p := s.Partner; p != nil {
		gauge(pairDesc, oneIf(p.Connected))
		gauge(carriesDesc, oneIf(p.Carries), s.Name)
		gauge(carriesDesc, oneIf(p.There), p.Name)
		gauge(apartDesc, oneIf(p.Apart))
		ch <- scrape.Const(toldDesc, prometheus.CounterValue, float64(p.Told), "told")
		ch <- scrape.Const(toldDesc, prometheus.CounterValue, float64(p.Heard), "heard")
		ch <- scrape.Const(splitDesc, prometheus.CounterValue, p.Seconds)
		ch <- scrape.Const(splitLoss, prometheus.CounterValue, float64(p.Dropped))
	}
	for _, h := range s.Hosts {
		gauge(flowsDesc, float64(h.Flows), h.label())
		gauge(weightDesc, float64(h.Weight), h.label())
		gauge(upDesc, oneIf(h.Up), h.label())
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

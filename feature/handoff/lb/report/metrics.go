// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/scrape"
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weir_lb_"+name, help, append([]string{"lb"}, labels...), nil)
}

var (
	flowsDesc    = desc("flows", "Known flows, by owning backend.", "backend")
	bufferedDesc = desc("buffered_flows", "Flows with buffered packets.")
	movingDesc   = desc("moving_flows", "Flows being moved.")
	upDesc       = desc("backend_up", "1: the backend gets new flows, if its weight is not 0.", "backend")
	weightDesc   = desc("backend_weight", "The backend's share of new flows.", "backend")
	loadDesc     = desc("backend_load", "Load of the least busy member of a service at the backend, in the service's own unit.", "backend", "service")
	packetsDesc  = desc("packets_total", "Packets, by verdict.", "verdict")
	learnedDesc  = desc("flows_learned_total", "Learned flows.")
	startingDesc = desc("starting", "1: the load balancer is new, and drops packets of unknown connections until the backends have reported theirs.")
	pairDesc     = desc("partner_connected", "1: the partner is connected.")
	carriesDesc  = desc("partner_carries", "1: clients' packets pass the load balancer named by carrier.", "carrier")
	apartDesc    = desc("partner_apart", "1: clients' packets pass here without a connection to the partner, and agents known from the partner are not connected here.")
	toldDesc     = desc("partner_flows_total", "Flow records sent to the partner (told) and received from it (heard).", "direction")
	splitDesc    = desc("partner_split_seconds_total", "Time with clients' packets at both load balancers, or with the two apart.")
	splitLoss    = desc("partner_split_dropped_packets_total", "Packets dropped in that time, of flows with another owner than this load balancer knows.")
	expiresDesc  = desc("certificate_expires_timestamp_seconds", "Expiry of the agent's certificate.")
	unreadDesc   = desc("certificate_refused", "1: the changed files of the agent's certificate are rejected.")
	faultsDesc   = desc("device_faults", "Interfaces of the load balancer without its program.")
	agentDesc    = desc("agent_up", "1: the agent answers.")
	readDesc     = prometheus.NewDesc("weir_lb_up", "Whether all load balancers could be read.", nil, nil)
)

func (s BackendStatus) label() string {
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

// Collector collects the metrics of load balancers.
type Collector struct {
	Statuses func(context.Context) ([]Status, error)
}

// Describe implements prometheus.Collector.
func (Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{flowsDesc, bufferedDesc, movingDesc, upDesc, weightDesc, loadDesc, packetsDesc, learnedDesc, readDesc,
		startingDesc, pairDesc, carriesDesc, apartDesc, toldDesc, splitDesc, splitLoss, expiresDesc, unreadDesc, agentDesc, faultsDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c Collector) Collect(ch chan<- prometheus.Metric) {
	all, err := c.Statuses(context.Background())
	var once feature.Once
	for _, s := range all {
		if once.First(s.Name) { // network namespaces may have load balancers of the same name
			s.collect(ch)
		}
	}
	ch <- scrape.Const(readDesc, prometheus.GaugeValue, feature.Gauge(err == nil))
}

func (s Status) collect(ch chan<- prometheus.Metric) {
	value := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- scrape.Const(d, kind, v, append([]string{s.Name}, labels...)...)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) { value(d, prometheus.GaugeValue, v, labels...) }
	gauge(agentDesc, oneIf(s.Agent))
	gauge(faultsDesc, float64(len(s.Devices)))
	if c := s.Certificate; c != nil {
		gauge(expiresDesc, float64(c.NotAfter.Unix()))
		gauge(unreadDesc, feature.Gauge(c.Problem != ""))
	}
	gauge(bufferedDesc, float64(s.Buffered))
	gauge(movingDesc, float64(s.Moving))
	gauge(startingDesc, oneIf(s.Starting))
	if p := s.Partner; p != nil {
		gauge(pairDesc, oneIf(p.Connected))
		gauge(carriesDesc, oneIf(p.Carries), s.Name)
		gauge(carriesDesc, oneIf(p.There), p.Name)
		gauge(apartDesc, oneIf(p.Apart))
		value(toldDesc, prometheus.CounterValue, float64(p.Told), "told")
		value(toldDesc, prometheus.CounterValue, float64(p.Heard), "heard")
		value(splitDesc, prometheus.CounterValue, p.Seconds)
		value(splitLoss, prometheus.CounterValue, float64(p.Dropped))
	}
	for _, h := range s.Backends {
		gauge(flowsDesc, float64(h.Flows), h.label())
		gauge(weightDesc, float64(h.Weight), h.label())
		gauge(upDesc, oneIf(h.Up), h.label())
		for service, n := range h.Loads {
			gauge(loadDesc, float64(n), h.label(), service)
		}
	}
	n := s.Counts
	value(learnedDesc, prometheus.CounterValue, float64(n.Learned))
	for verdict, v := range map[string]uint64{"to_backend": n.In, "to_client": n.Out, "buffered": n.Buffered, "late": n.Late, "icmp_error": n.ICMP,
		"too_big": n.Big, "dropped_other_owner": n.Mute, "dropped_reset": n.NoReset, "dropped_no_backend": n.NoBackend, "dropped_stranger": n.UnknownSource,
		"dropped_fragment": n.Fragment, "dropped_awaited": n.Awaited, "unlearned": n.Full} {
		value(packetsDesc, prometheus.CounterValue, float64(v), verdict)
	}
}

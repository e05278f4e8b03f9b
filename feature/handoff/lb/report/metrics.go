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
	flowsDesc    = desc("flows", "Flows that the load balancer knows, by the backend that owns them.", "backend")
	bufferedDesc = desc("buffered_flows", "Flows whose packets wait.")
	movingDesc   = desc("moving_flows", "Flows that are being moved.")
	upDesc       = desc("backend_up", "1: the backend gets new flows, its weight permitting.", "backend")
	weightDesc   = desc("backend_weight", "The backend's share of new flows.", "backend")
	loadDesc     = desc("backend_load", "What waits for the least busy member of a service at the backend, in the service's own unit.", "backend", "service")
	packetsDesc  = desc("packets_total", "Packets, by what became of them.", "verdict")
	learnedDesc  = desc("flows_learned_total", "Flows that became known.")
	startingDesc = desc("starting", "1: packets of unknown connections wait for the backends to say which are theirs.")
	pairDesc     = desc("partner_connected", "1: the other load balancer is heard.")
	carriesDesc  = desc("partner_carries", "1: clients' packets come by that load balancer.", "carrier")
	apartDesc    = desc("partner_apart", "1: clients' packets come by here, the partner is not heard, and agents of backends that were there are not here.")
	toldDesc     = desc("partner_flows_total", "Flows told to the other load balancer, and heard from it.", "direction")
	splitDesc    = desc("partner_split_seconds_total", "Time in which both load balancers carried clients' packets, or were apart.")
	splitLoss    = desc("partner_split_dropped_packets_total", "Packets dropped meanwhile, of flows that are not where this load balancer knows them.")
	expiresDesc  = desc("certificate_expires_timestamp_seconds", "When the agent's certificate expires.")
	unreadDesc   = desc("certificate_refused", "1: the files of the agent's certificate have changed, and are not used.")
	faultsDesc   = desc("device_faults", "Interfaces of the load balancer at which nothing of it runs.")
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

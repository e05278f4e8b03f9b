// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/scrape"
	"github.com/weir-project/weir/kernel"
)

// collector reads the pins at every scrape. It has no state.
type collector struct{ root *kernel.Root }

// newCollector returns a collector of every service's slots.
func newCollector(r *kernel.Root) prometheus.Collector { return collector{r} }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weir_steer_"+name, help, append([]string{"service", "netns"}, labels...), nil)
}

var (
	packetsDesc = desc("packets_total", "UDP datagrams and TCP connection attempts, by verdict.",
		"slot", "protocol", "verdict")
	admittedDesc = desc("slot_admitted", "Whether the slot's traffic reaches a member.", "slot", "member")
	emptyDesc    = desc("slot_empty", "Slots without a complete member, by reason.", "slot", "reason")
	sinceDesc    = desc("slot_since_timestamp_seconds", "Last change of the slot's state, seconds since the epoch.", "slot")
	bucketsDesc  = desc("slot_buckets", "Buckets of source addresses assigned to the slot.", "slot")
	queueDesc    = desc("socket_queue", "Bytes waiting in a UDP socket, connections waiting in a listener.", "slot", "listen")
	bufferDesc   = desc("socket_buffer_bytes", "Receive buffer of a UDP socket.", "slot", "listen")
	backlogDesc  = desc("socket_backlog_connections", "Backlog of a listener.", "slot", "listen")
	dropsDesc    = desc("socket_drops_total", "Packets dropped by a socket, mostly for lack of buffer space.", "slot", "listen")
	devicesDesc  = desc("devices", "Remembered source addresses.", "slot")
	sharedDesc   = desc("shared_sockets_total", "Sockets bound to a port of the service, by the result of setting SO_REUSEPORT.", "result")
	bypassDesc   = desc("bypassed", "Whether the service is bypassed: the kernel alone chooses.")
	drainedDesc  = desc("slot_drained", "Whether the slot is drained: it gets no bucket for now.", "slot")
	misplaceDesc = desc("sessions_misplaced", "TCP sessions of another slot's member than their device's datagrams.")
	copiesDesc   = desc("copied_datagrams_total", "Datagrams to copy to another service, by result.", "to", "result")
	boundDesc    = desc("bindings", "Bindings of a service.")
	givenDesc    = desc("registered_sockets", "Open sockets registered for a service.", "kind")
	peersDesc    = desc("known_peers", "Known UDP peers of a slot's generations: serves or drains.", "slot", "generation")
	drainingDesc = desc("draining", "TCP sessions and queued connections left with a slot's previous generation.", "slot", "left")
	keptDesc     = desc("draining_packets_total", "Packets to the draining generation: known: datagrams of its peers, back: packets during an incomplete successor.", "slot", "why")
	hitsDesc     = desc("dispatched_packets_total", "UDP datagrams and TCP connection attempts bound to registered sockets, by result.", "result")
	upDesc       = prometheus.NewDesc("weir_steer_up", "Whether all pins are readable.", nil, nil)
)

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{packetsDesc, admittedDesc, emptyDesc, sinceDesc, bucketsDesc, queueDesc, bufferDesc, backlogDesc, dropsDesc, devicesDesc, sharedDesc, copiesDesc, boundDesc, givenDesc, hitsDesc, upDesc,
		templatesDesc, exportersDesc, refusedDesc, replaysDesc, bypassDesc, drainedDesc, misplaceDesc, peersDesc, drainingDesc, keptDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	st, err := state.Read(context.Background(), c.root)
	ch <- scrape.Const(upDesc, prometheus.GaugeValue, feature.Gauge(err == nil && len(st.Unreadable) == 0))
	st.ExplainEmpty(context.Background())
	var once, bound feature.Once
	for i := range st.Services {
		if s := &st.Services[i]; once.First(s.Name, s.Netns) {
			c.service(ch, s)
		}
	}
	for _, d := range st.Bound {
		if bound.First(d.Netns) {
			c.dispatch(ch, d)
		}
	}
}

// dispatch exports the bindings and registered sockets of a namespace.
func (c collector) dispatch(ch chan<- prometheus.Metric, d state.Bindings) {
	all, err := bindings.Registered(c.root, d.Scope, false)
	if err != nil {
		return // removed meanwhile
	}
	for _, n := range all {
		send := func(desc *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
			ch <- scrape.Const(desc, t, v, append([]string{n.Service, d.Netns}, labels...)...)
		}
		send(boundDesc, prometheus.GaugeValue, float64(n.Bindings))
		if n.Configured {
			continue // its slots are exported
		}
		for kind := range uint32(engine.KindsIPv4) {
			name := bindings.KindName(kind)
			has := slices.ContainsFunc(n.Sockets, func(s bindings.RegisteredSocket) bool { return s.Kind == name })
			send(givenDesc, prometheus.GaugeValue, feature.Gauge(has), name)
		}
		send(hitsDesc, prometheus.CounterValue, float64(n.Steered), "steered")
		send(hitsDesc, prometheus.CounterValue, float64(n.Rejected), "rejected")
		send(hitsDesc, prometheus.CounterValue, float64(n.Failed), "failed")
	}
}

func (c collector) service(ch chan<- prometheus.Metric, s *state.Service) {
	send := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		ch <- scrape.Const(d, t, v, append([]string{s.Name, s.Netns}, labels...)...)
	}
	if s.Shared != nil {
		send(sharedDesc, prometheus.CounterValue, float64(s.Shared.Sockets), "shared")
		send(sharedDesc, prometheus.CounterValue, float64(s.Shared.Failed), "failed")
	}
	if c := s.Copies; c != nil {
		send(copiesDesc, prometheus.CounterValue, float64(c.Copied), c.To, "copied")
		send(copiesDesc, prometheus.CounterValue, float64(c.Fragmented), c.To, "fragmented")
		send(copiesDesc, prometheus.CounterValue, float64(c.Failed), c.To, "failed")
	}
	send(bypassDesc, prometheus.GaugeValue, feature.Gauge(s.Bypassed))
	if found, err := s.Misplaced(context.Background()); err == nil {
		send(misplaceDesc, prometheus.GaugeValue, float64(len(found)))
	}
	devices := make([]int, len(s.Slots))
	if all, _, err := s.Devices(c.root); err == nil {
		for _, d := range all {
			if d.Slot >= 0 && d.Slot < len(devices) {
				devices[d.Slot]++
			}
		}
	}
	if t, err := templates.Templates(s, c.root); err == nil {
		send(templatesDesc, prometheus.GaugeValue, float64(t.Count()))
		send(exportersDesc, prometheus.GaugeValue, float64(len(t.Exporters)))
		send(refusedDesc, prometheus.CounterValue, float64(t.Refused))
		send(replaysDesc, prometheus.CounterValue, float64(t.Replayed))
	}
	for n, slot := range s.Slots {
		label := strconv.Itoa(slot.Slot)
		send(admittedDesc, prometheus.GaugeValue, feature.Gauge(slot.Admitted()), label, slot.Member)
		if slot.Reason != "" && slot.Occupant == "" && !slot.Admitted() {
			send(emptyDesc, prometheus.GaugeValue, 1, label, slot.Reason)
		}
		send(drainedDesc, prometheus.GaugeValue, feature.Gauge(slices.Contains(s.Drained, slot.Slot)), label)
		send(bucketsDesc, prometheus.GaugeValue, float64(slot.Buckets), label)
		send(devicesDesc, prometheus.GaugeValue, float64(devices[n]), label)
		if !slot.Since.IsZero() {
			send(sinceDesc, prometheus.GaugeValue, float64(slot.Since.UnixMilli())/1000, label)
		}
		if slot.Peers != nil {
			send(peersDesc, prometheus.GaugeValue, float64(*slot.Peers), label, "serves")
		}
		if d := slot.Draining; d != nil {
			send(peersDesc, prometheus.GaugeValue, float64(d.Peers), label, "drains")
			send(drainingDesc, prometheus.GaugeValue, float64(d.Waiting), label, "waiting")
			if d.Sessions >= 0 {
				send(drainingDesc, prometheus.GaugeValue, float64(d.Sessions), label, "sessions")
			}
			send(keptDesc, prometheus.CounterValue, float64(d.Kept), label, "known")
			send(keptDesc, prometheus.CounterValue, float64(d.Back), label, "back")
		}
		for proto, v := range slot.Verdicts {
			for verdict, count := range map[string]uint64{"steered": v.Steered, "rejected": v.Rejected, "dropped": v.Dropped,
				"passed": v.Passed, "diverted": v.Diverted, "guest": v.Guests, "failed": v.Failed} {
				send(packetsDesc, prometheus.CounterValue, float64(count), label, proto, verdict)
			}
		}
		for _, sock := range slot.Sockets {
			if sock.Cookie == 0 {
				continue
			}
			send(queueDesc, prometheus.GaugeValue, float64(sock.Queue), label, sock.Listen)
			send(dropsDesc, prometheus.CounterValue, float64(sock.Drops), label, sock.Listen)
			if sock.Buffer > 0 {
				send(bufferDesc, prometheus.GaugeValue, float64(sock.Buffer), label, sock.Listen)
			} else {
				send(backlogDesc, prometheus.GaugeValue, float64(sock.Backlog), label, sock.Listen)
			}
		}
	}
}

var (
	templatesDesc = desc("templates", "Remembered templates of the service's IPFIX and NetFlow v9 exporters.")
	exportersDesc = desc("template_exporters", "Observation domains and source ids with remembered templates.")
	refusedDesc   = desc("templates_refused_total", "Template messages that were unreadable, too many or without room, and exporters forgotten for lack of room.")
	replaysDesc   = desc("template_replays_total", "Replays of an observation domain's templates to a member without them.")
)

var _ prometheus.Collector = collector{}

// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/scrape"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// collector reads the pins for every scrape and keeps no state.
type collector struct{ root *kernel.Root }

// Collector implements feature.Measured.
func (Feature) Collector(r *kernel.Root) prometheus.Collector { return collector{r} }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weir_guard_"+name, help, append([]string{"service", "netns"}, labels...), nil)
}

var (
	packetsDesc   = desc("packets_total", "Packets decided by a guard, by verdict and the tier of their source.", "tier", "verdict")
	malformedDesc = desc("malformed_packets_total", "Packets refused because of incomplete or malformed headers.")
	limitDesc     = desc("limit_packets_per_second", "Limit for all packets of the service.")
	eachDesc      = desc("each_limit_packets_per_second", "Limit for packets to each address and port of the service.")
	reservedDesc  = desc("reserved_packets_per_second", "Part of the limit reserved by known sources.")
	ownersDesc    = desc("reservation_owners", "Number of sources with a reservation.")
	attackDesc    = desc("under_attack", "1 if packets were refused in the last few seconds, else 0.")
	dryDesc       = desc("dry_run", "1 if refused packets pass, else 0.")
	topDesc       = desc("top_refused_packets_per_second", "Estimated refused packets of the heaviest patterns.", "level", "pattern")
	problemDesc   = desc("problem", "1 if the guard is not in effect, else 0.")
	upDesc        = prometheus.NewDesc("weir_guard_up", "1 if all pins were readable, else 0.", nil, nil)
)

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{packetsDesc, malformedDesc, limitDesc, eachDesc, reservedDesc, ownersDesc, attackDesc, dryDesc, topDesc, problemDesc, upDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	st, err := readGuards(context.Background(), c.root)
	ch <- scrape.Const(upDesc, prometheus.GaugeValue, feature.Gauge(err == nil && len(st.Unreadable) == 0))
	var once feature.Once
	for _, g := range st.Guards {
		if !once.First(g.Service, g.Netns) {
			continue
		}
		g.collect(func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
			ch <- scrape.Const(d, t, v, append([]string{g.Service, g.Netns}, labels...)...)
		})
	}
}

func (g GuardState) collect(send func(*prometheus.Desc, prometheus.ValueType, float64, ...string)) {
	for tier, n := range g.Tiers {
		send(packetsDesc, prometheus.CounterValue, float64(n.Passed), tier, "passed")
		send(packetsDesc, prometheus.CounterValue, float64(n.Refused), tier, "refused")
	}
	send(malformedDesc, prometheus.CounterValue, float64(g.Malformed))
	// Omit an unset limit, because 0 would mean a limit of 0.
	if g.Limit != 0 {
		send(limitDesc, prometheus.GaugeValue, float64(g.Limit))
	}
	if g.Each != 0 {
		send(eachDesc, prometheus.GaugeValue, float64(g.Each))
	}
	send(reservedDesc, prometheus.GaugeValue, g.Reserved)
	send(ownersDesc, prometheus.GaugeValue, float64(g.ReservationOwners))
	send(attackDesc, prometheus.GaugeValue, feature.Gauge(g.UnderAttack))
	send(dryDesc, prometheus.GaugeValue, feature.Gauge(g.DryRun))
	send(problemDesc, prometheus.GaugeValue, feature.Gauge(g.Problem != ""))
	for _, p := range g.Top {
		send(topDesc, prometheus.GaugeValue, p.PPS, p.Level, p.String())
	}
}

// notLocal reports non-local addresses of a guard at the sockets: the host delivers no packets for
// them.
func (g *GuardState) notLocal() (out []feature.Finding) {
	if len(g.rec.Spec.Service.Interfaces) > 0 {
		return nil // guards at interfaces also limit forwarded packets
	}
	ns, err := g.rec.Netns()
	if err != nil {
		return nil // reported as the guard's problem
	}
	defer ns.Close()
	var absent []netip.Prefix
	if err := ns.Do(func() (err error) { absent, err = service.NotLocal(g.rec.Spec.Service.udp()); return err }); err != nil {
		return []feature.Finding{{Object: g.Service, Text: err.Error()}}
	}
	for _, p := range absent {
		out = append(out, feature.Finding{Object: g.Service, Text: fmt.Sprintf("its listen address %s is not local: no packet to it reaches a socket or this guard", p),
			Remedy: "correct listen, or set interfaces to limit forwarded packets"})
	}
	return out
}

// Failures implements feature.Failing: guards not in effect at their hooks. Guards of removed
// namespaces are no failures: weir serve removes them.
func (st State) Failures() []feature.Finding {
	return slices.DeleteFunc(st.findings(), func(f feature.Finding) bool { return !f.Fails })
}

// findings returns the failures and the guards of removed namespaces.
func (st State) findings() (out []feature.Finding) {
	for _, g := range st.Guards {
		if g.Problem != "" {
			gone, _ := g.rec.Gone() // for a user without access to the namespace, it is a failure
			out = append(out, feature.Finding{Object: g.Service, Text: g.Problem, Fails: !gone})
		}
	}
	return out
}

// Examine implements feature.Examiner: guards not in effect, non-local addresses and outdated
// programs.
func (Feature) Examine(ctx context.Context, r *kernel.Root) ([]feature.Finding, error) {
	st, err := readGuards(ctx, r)
	out := st.findings()
	for _, g := range st.Guards {
		out = append(out, g.notLocal()...)
	}
	if len(st.outdated) > 0 {
		out = append(out, feature.Finding{Object: "guards", Text: "programs loaded by another weir version", Remedy: "weir upgrade replaces them without missing a packet"})
	}
	return append(out, feature.UnreadFindings(st.Unreadable)...), err
}

// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/internal/scrape"
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weir_handoff_"+name, help, append([]string{"service"}, labels...), nil)
}

var (
	sessionsDesc  = desc("sessions", "Kept sockets, owned by a member or waiting for one.", "kind", "is")
	membersDesc   = desc("members", "Connected members.")
	stateDesc     = desc("state_bytes", "State kept with the sessions.")
	keptDesc      = desc("kept_total", "Sockets accepted by the keeper.")
	commitsDesc   = desc("commits_total", "Commits of positions and states.")
	movesDesc     = desc("moves_total", "Sessions moved from one member to another: by transfer, after a crash, after a leave.", "by")
	refusalsDesc  = desc("refusals_total", "Failed or rejected transfers.")
	resetsDesc    = desc("resets_total", "Reset sessions: no member in time, uncommitted bytes, or closed by the peer.", "reason")
	overLimitDesc = desc("over_limit_total", "Requests to keep a socket or state above a limit, retries included.")
	strangersDesc = prometheus.NewDesc("weir_handoff_refused_processes_total", "Processes rejected as members.", nil, nil)
)

// Collector returns a collector of the keeper's metrics.
func (k *Keeper) Collector() prometheus.Collector { return collector{k} }

type collector struct{ k *Keeper }

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{sessionsDesc, membersDesc, stateDesc, keptDesc, commitsDesc, movesDesc, refusalsDesc, resetsDesc, overLimitDesc, strangersDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	r := c.k.Report()
	ch <- scrape.Const(strangersDesc, prometheus.CounterValue, float64(r.Strange))
	for _, s := range r.Services {
		collect(s, func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
			ch <- scrape.Const(d, t, v, append([]string{s.Name}, labels...)...)
		})
	}
}

func collect(s Service, send func(*prometheus.Desc, prometheus.ValueType, float64, ...string)) {
	count := func(d *prometheus.Desc, n uint64, labels ...string) {
		send(d, prometheus.CounterValue, float64(n), labels...)
	}
	type group struct{ kind, is string }
	groups, state := map[group]int{}, int64(0)
	for _, x := range s.Sessions {
		g := group{x.Kind, "owned"}
		if x.PID == 0 {
			g.is = "waiting"
		}
		groups[g]++
		state += x.State
	}
	for _, kind := range []string{"session", "listener", "packet"} {
		for _, is := range []string{"owned", "waiting"} {
			send(sessionsDesc, prometheus.GaugeValue, float64(groups[group{kind, is}]), kind, is)
		}
	}
	send(membersDesc, prometheus.GaugeValue, float64(len(s.Members)))
	send(stateDesc, prometheus.GaugeValue, float64(state))
	count(keptDesc, s.Counts.Kept)
	count(commitsDesc, s.Counts.Commits)
	count(movesDesc, s.Counts.Transfers, "transfer")
	count(movesDesc, s.Counts.Rescued, "crash")
	count(movesDesc, s.Counts.Inherited, "leave")
	count(refusalsDesc, s.Counts.Rejected)
	count(resetsDesc, s.Counts.Expired, "expired")
	count(resetsDesc, s.Counts.Gaps, "uncommitted")
	count(resetsDesc, s.Counts.Closed, "closed")
	count(overLimitDesc, s.Counts.OverLimit)
}

// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/scrape"
	"github.com/weir-project/weir/kernel"
)

// collector reads the pins for every scrape and caches nothing.
type collector struct{ root *kernel.Root }

// Collector implements feature.Measured.
func (Feature) Collector(r *kernel.Root) prometheus.Collector { return collector{r} }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weir_reroute_"+name, help, labels, nil)
}

var (
	upDesc       = desc("up", "Whether all pins could be read.")
	downDesc     = desc("link_down", "Whether the path's link may not be used, by reason.", "path", "netns", "interface", "reason")
	packetsDesc  = desc("packets_total", "Packets of a path while its link was down, by fate; a GSO train counts once. rerouted; shadow: would have been rerouted. Stayed on the link: stayed_exempt (belongs to the link), stayed_no_repair (no repair for the IP version). too_big: over the repair's MTU, fragmented or answered with Packet Too Big. Dropped: dropped_no_way_left, dropped_too_big (even then), dropped_kernel (the kernel could not add the outer headers).", "path", "netns", "fate")
	bytesDesc    = desc("bytes_total", "Bytes of rerouted packets, from the IP header on, without added headers.", "path", "netns")
	routesDesc   = desc("routes", "Destinations routed over a path's interface, by fate: alone (no route over another interface), carrier (lost with the carrier), kept (of these, still rerouted by weir serve), lost (kept, without any other route now).", "path", "netns", "interface", "fate")
	learntDesc   = desc("learnt_bytes", "Largest packet of a repair, with outer headers, as reported by a router on its way; absent if the size of its own interface applies.", "path", "netns", "repair")
	dropsDesc    = desc("dropping", "Whether packets of a path are dropped because its link and all its repairs are down. packets_total with fate dropped_no_way_left counts them.", "path", "netns", "interface", "version")
	problemDesc  = desc("problem", "Whether a path or a session has a problem.", "path", "netns")
	phaseDesc    = desc("session_up", "Whether a session has found its link up.", "session", "netns", "interface")
	wayDesc      = desc("session_direction_up", "Whether a direction of the link works; absent while unknown.", "session", "netns", "direction")
	flapsDesc    = desc("session_flaps_total", "Times a session went down.", "session", "netns")
	grantedDesc  = desc("session_granted_total", "Verdicts delayed by a stall of this host.", "session", "netns", "judge")
	sentDesc     = desc("probes_sent_total", "Probes sent; wraps around at 2^32.", "session", "netns")
	answeredDesc = desc("probes_answered_total", "Answered probes; wraps around at 2^32.", "session", "netns")
	heardDesc    = desc("probes_heard_total", "Received probes of the peer; wraps around at 2^32.", "session", "netns")
	lostDesc     = desc("probes_lost_total", "Lost probes and answers, by direction.", "session", "netns", "direction")
	rttDesc      = desc("rtt_seconds", "Round-trip time of probes since the start of the session.", "session", "netns", "quantile")
	jitterDesc   = desc("jitter_seconds", "Jitter of round trips (RFC 3550 section 6.4.1).", "session", "netns")
	refusedDesc  = desc("probes_refused_total", "Rejected packets in the form of probes, by reason; session is empty for unknown sources.", "session", "netns", "reason")
	stallsDesc   = desc("stalls_total", "Ticks of a timer loop more than 1.5 ms late, because its CPU stalled.", "netns", "cpu")
	longestDesc  = desc("stall_longest_seconds", "Longest stall of a timer loop's CPU.", "netns", "cpu")
	spentDesc    = desc("tick_seconds_total", "CPU time of a timer loop's ticks.", "netns", "cpu")
	bfdUpDesc    = desc("bfd_up", "Whether a BFD session is up.", "session", "netns", "interface")
	unjudgedDesc = desc("link_unjudged", "Whether a path's link has no judge, because its session of FRR's bfdd does not exist.", "path", "netns", "interface")
	bfdDownsDesc = desc("bfd_downs_total", "Times a BFD session left the state up.", "session", "netns")
	bfdDesc      = desc("bfd_packets_total", "Control packets of a BFD session, by fate: in, out, or the reason of a rejection.", "session", "netns", "fate")
	bfdEchoDesc  = desc("bfd_echo_packets_total", "Echo packets of a BFD session: sent, returned, or refused for a wrong identification.", "session", "netns", "fate")
	bfdEchoBad   = desc("bfd_echo_failed", "Whether echo packets of a BFD session do not return any more.", "session", "netns")
	bfdTimeDesc  = desc("bfd_detection_seconds", "Detection time: longest accepted silence of the neighbour.", "session", "netns")
	allDescs     = []*prometheus.Desc{upDesc, downDesc, packetsDesc, bytesDesc, routesDesc, learntDesc, dropsDesc, problemDesc, phaseDesc, wayDesc, flapsDesc, grantedDesc, sentDesc, answeredDesc, heardDesc, lostDesc, rttDesc, jitterDesc, refusedDesc, stallsDesc, longestDesc, spentDesc, bfdUpDesc, unjudgedDesc, bfdDownsDesc, bfdDesc, bfdTimeDesc, bfdEchoDesc, bfdEchoBad}
)

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range allDescs {
		ch <- d
	}
}

// send sends a metric with a value.
type send func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string)

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	st, err := ReadState(context.Background(), c.root)
	out := send(func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		ch <- scrape.Const(d, t, v, labels...)
	})
	out(upDesc, prometheus.GaugeValue, feature.Gauge(err == nil && len(st.Unreadable) == 0))
	var once feature.Once
	for _, p := range st.Paths {
		if once.First("path", p.Name, p.Netns) {
			path(p, out)
		}
	}
	for _, s := range st.Sessions {
		if once.First("session", s.Name, s.Netns) {
			session(s, out)
		}
	}
	for _, s := range st.BFD {
		if !s.Unjudged && once.First("bfd", s.Name, s.Netns) { // link_unjudged reports it
			neighbour(s, out)
		}
	}
	for reason, n := range st.UnknownSources {
		out(refusedDesc, prometheus.CounterValue, float64(n), "", "", reason)
	}
	for _, l := range st.TimerLoops {
		loop(l, out)
	}
}

func path(p protect.PathState, out send) {
	for reason, on := range map[string]bool{"probe": p.Probe, "carrier": p.Carrier, "drain": p.Drain} {
		out(downDesc, prometheus.GaugeValue, feature.Gauge(on), p.Name, p.Netns, p.Device, reason)
	}
	c := p.Counts
	for fate, n := range map[string]uint64{"rerouted": c.Packets, "shadow": c.Shadow, "stayed_exempt": c.Exempt, "stayed_no_repair": c.None, "too_big": c.Big,
		"dropped_no_way_left": c.Stuck, "dropped_too_big": c.Lost, "dropped_kernel": c.Odd} {
		out(packetsDesc, prometheus.CounterValue, float64(n), p.Name, p.Netns, fate)
	}
	out(bytesDesc, prometheus.CounterValue, float64(c.Bytes), p.Name, p.Netns)
	for fate, n := range map[string]int{"alone": p.Routes.Alone, "carrier": p.Routes.Carrier, "kept": p.Routes.Kept, "lost": p.Routes.Lost} {
		out(routesDesc, prometheus.GaugeValue, float64(n), p.Name, p.Netns, p.Device, fate)
	}
	for i, r := range p.Repairs {
		if r.Learnt {
			out(learntDesc, prometheus.GaugeValue, float64(r.MTU), p.Name, p.Netns, strconv.Itoa(i+1))
		}
	}
	out(unjudgedDesc, prometheus.GaugeValue, feature.Gauge(p.Unjudged), p.Name, p.Netns, p.Device)
	for _, version := range []string{"IPv4", "IPv6"} {
		out(dropsDesc, prometheus.GaugeValue, feature.Gauge(slices.Contains(p.Dropped, version)), p.Name, p.Netns, p.Device, version)
	}
	out(problemDesc, prometheus.GaugeValue, feature.Gauge(len(p.Problems) > 0 || !p.Attached), p.Name, p.Netns)
}

func session(s liveness.SessionState, out send) {
	out(phaseDesc, prometheus.GaugeValue, feature.Gauge(s.Phase == liveness.Up), s.Name, s.Netns, s.Device)
	for name, way := range map[string]liveness.Direction{"out": s.Out, "in": s.In} {
		if way != liveness.Unknown {
			out(wayDesc, prometheus.GaugeValue, feature.Gauge(way == liveness.Works), s.Name, s.Netns, name)
		}
	}
	out(flapsDesc, prometheus.CounterValue, float64(s.Flaps), s.Name, s.Netns)
	for judge, j := range map[string]*liveness.Judgement{"sender": s.Sender, "peer": s.Peer} {
		if j != nil {
			out(grantedDesc, prometheus.CounterValue, float64(j.Granted), s.Name, s.Netns, judge)
		}
	}
	for d, n := range map[*prometheus.Desc]uint32{sentDesc: s.Sent, answeredDesc: s.Answered, heardDesc: s.Heard} {
		out(d, prometheus.CounterValue, float64(n), s.Name, s.Netns)
	}
	out(lostDesc, prometheus.CounterValue, float64(s.LostOut), s.Name, s.Netns, "out")
	out(lostDesc, prometheus.CounterValue, float64(s.LostIn)+float64(s.LostHeard), s.Name, s.Netns, "in")
	for q, d := range map[string]float64{"0": s.RTT.Min.Seconds(), "0.5": s.RTT.P50.Seconds(), "0.99": s.RTT.P99.Seconds()} {
		out(rttDesc, prometheus.GaugeValue, d, s.Name, s.Netns, q)
	}
	out(jitterDesc, prometheus.GaugeValue, s.RTT.Jitter.Seconds(), s.Name, s.Netns)
	for reason, n := range s.Counts {
		out(refusedDesc, prometheus.CounterValue, float64(n), s.Name, s.Netns, reason)
	}
}

func neighbour(s peers.SessionState, out send) {
	out(bfdUpDesc, prometheus.GaugeValue, feature.Gauge(s.State == bfd.Up), s.Name, s.Netns, s.Device)
	out(bfdDownsDesc, prometheus.CounterValue, float64(s.Downs), s.Name, s.Netns)
	for fate, n := range map[string]uint64{"in": s.In, "out": s.Out, "not_authentic": s.NotAuthentic, "malformed": s.Malformed} {
		out(bfdDesc, prometheus.CounterValue, float64(n), s.Name, s.Netns, fate)
	}
	out(bfdTimeDesc, prometheus.GaugeValue, s.Detection.Seconds(), s.Name, s.Netns)
	if e := s.Echo; e != nil {
		for fate, n := range map[string]uint64{"sent": e.Sent, "returned": e.Returned, "refused": e.Refused} {
			out(bfdEchoDesc, prometheus.CounterValue, float64(n), s.Name, s.Netns, fate)
		}
		out(bfdEchoBad, prometheus.GaugeValue, feature.Gauge(e.Failed), s.Name, s.Netns)
	}
}

func loop(l liveness.TimerLoopState, out send) {
	cpu := strconv.Itoa(l.CPU)
	out(stallsDesc, prometheus.CounterValue, float64(l.Stalls), l.Netns, cpu)
	out(longestDesc, prometheus.GaugeValue, l.Longest.Seconds(), l.Netns, cpu)
	out(spentDesc, prometheus.CounterValue, l.Spent.Seconds(), l.Netns, cpu)
}

// Failures implements feature.Failing: paths without a repair, packets without a way left, sessions unable to probe,
// silent loops. Deleted namespaces are left to weir serve. A path with another repair in force, or a session not
// handed over by bfdd, is only a warning.
func (st State) Failures() []feature.Finding {
	return slices.DeleteFunc(st.findings(), func(f feature.Finding) bool { return !f.Fails })
}

// silentLoop is the time without a tick after which a loop has lost its packet. It allows for stalls of the host.
const silentLoop = 2 * time.Second

// findings returns the failures and the warnings.
func (st State) findings() (out []feature.Finding) {
	for _, p := range st.Paths {
		for _, problem := range p.Problems {
			text, remedy := problemRemedy(problem)
			if p.Gone {
				text, remedy = problem, goneRemedy
			}
			out = append(out, feature.Finding{Object: "path " + p.Name, Text: text, Remedy: remedy, Fails: !p.Gone && !p.InForce})
		}
		if !p.Attached && len(p.Problems) == 0 {
			out = append(out, feature.Failure("path "+p.Name, "nothing is attached to "+p.Device, "run weir serve, or weir apply again: both attach it"))
		}
		out = append(out, droppedPackets(p)...)
	}
	for _, s := range st.Sessions {
		if s.Problem != "" {
			out = append(out, feature.Finding{Object: "session " + s.Name, Text: s.Problem, Remedy: sessionRemedy(s.Gone), Fails: !s.Gone})
		}
	}
	for _, s := range st.BFD {
		if s.Problem == "" {
			continue
		}
		remedy := sessionRemedy(s.Gone)
		switch {
		case s.NoDevice && !s.Gone:
			remedy = "weir serve uses it once it exists; else change the path in the file, then weir apply"
		case s.Unjudged:
			remedy = fmt.Sprintf("run weir serve, start bfdd with --dplaneaddr %s, and configure its peer %s (vtysh show bfd peers)", s.FRR, s.Peer)
		}
		out = append(out, feature.Finding{Object: "BFD session " + s.Name, Text: s.Problem, Remedy: remedy, Fails: !s.Gone && (!s.Unjudged || s.NoDevice)})
	}
	for _, l := range st.TimerLoops {
		if l.Silent > silentLoop {
			out = append(out, feature.Failure("tick source", fmt.Sprintf("the timer loop of CPU %d has not ticked for more than %s", l.CPU, silentLoop),
				"run weir serve: it puts a packet back into the loop"))
		}
	}
	return out
}

// Examine implements feature.Examiner: the failures, learnt smaller MTUs, and routes lost with an interface.
func (Feature) Examine(ctx context.Context, r *kernel.Root) ([]feature.Finding, error) {
	st, err := ReadState(ctx, r)
	out := st.findings()
	for _, p := range st.Paths {
		out = append(out, learntSizes(p)...)
	}
	for _, p := range protect.Vanishing(st.protect) {
		out = append(out, feature.Finding{Object: "path " + p.Path, Text: p.Text, Remedy: p.Remedy})
	}
	out = append(out, keyless(st.BFD)...)
	return append(out, feature.UnreadFindings(st.Unreadable)...), err
}

// keyless warns of BFD sessions identified by the neighbour's address and port only.
func keyless(all []peers.SessionState) []feature.Finding {
	var names []string
	for _, s := range all {
		if s.Keyless && !s.Gone {
			names = append(names, s.Name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return []feature.Finding{{Object: "BFD without a key", Text: strings.Join(names, ", ") + ": before the neighbor's daemon opens its port, another user of its host can take the port and impersonate it",
		Remedy: "give bfd a key_file at both ends; without one keep other users off the neighbor's host"}}
}

// problemRemedy splits a path's problem into text and remedy. The remedy is the last clause, if it is an instruction.
func problemRemedy(problem string) (text, remedy string) {
	if i := strings.LastIndex(problem, ": "); i >= 0 {
		text, last := problem[:i], problem[i+2:]
		switch verb, _, _ := strings.Cut(last, " "); verb {
		case "say":
			return text, last + " in the file, then weir apply"
		case "protect":
			return text, last + ": change the file, then weir apply"
		case "make", "run":
			return text, last
		}
	}
	return problem, "weir serve applies it once this has changed; else change the path in the file, then weir apply"
}

func sessionRemedy(gone bool) string {
	if gone {
		return goneRemedy
	}
	return "run weir serve: it starts the session once this has changed"
}

// droppedPackets reports a path without any way left.
func droppedPackets(p protect.PathState) []feature.Finding {
	if len(p.Dropped) == 0 {
		return nil
	}
	return []feature.Finding{feature.Failure("path "+p.Name, fmt.Sprintf("%s packets by %s are dropped, no way left: the link (%s) and all its repairs are down", strings.Join(p.Dropped, " and "), p.Device, strings.Join(whyDown(p), ", ")),
		p.Remedy)}
}

// learntSizes reports links on repairs' ways with a smaller MTU than the repair's own interface.
func learntSizes(p protect.PathState) (out []feature.Finding) {
	for i, r := range p.Repairs {
		if r.Learnt && r.Fits <= protect.LeastMTU {
			out = append(out, feature.Finding{Object: "path " + p.Name, Text: fmt.Sprintf("a link on the way of repair %d has an MTU of %d bytes or less: IPv6 needs that with the outer headers, and larger packets are lost there", i+1, r.MTU),
				Remedy: "give the link a larger MTU"})
		} else if r.Learnt {
			out = append(out, feature.Finding{Object: "path " + p.Name, Text: fmt.Sprintf("a link on the way of repair %d has an MTU of %d bytes, less than %s", i+1, r.MTU, r.Device),
				Remedy: fmt.Sprintf("give the repair mtu: %d, or the link a larger one: each time the size is learnt a packet is lost", r.MTU)})
		}
	}
	return out
}

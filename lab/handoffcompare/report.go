// SPDX-License-Identifier: Apache-2.0

package handoffcompare

import (
	"fmt"
	"slices"

	"github.com/weir-project/weir/lab"
)

// report sets the metrics: the results of each way, and ratios within the same round.
func (x *experiment) report() {
	for c, f := range x.found {
		name := fmt.Sprintf("%s_%d", c.way, c.servers)
		p50, p99, longest := lab.Percentiles(f.latency)
		x.result.Set("us_p50_"+name, micros(p50))
		x.result.Set("us_p99_"+name, micros(p99))
		x.result.Set("us_p999_"+name, micros(f.latency[len(f.latency)*999/1000]))
		x.result.Set("us_max_"+name, micros(longest))
		x.result.Set("gbits_up_"+name, median(f.up))
		x.result.Set("gbits_down_"+name, median(f.down))
	}
	idle, strange := 0, 0
	for c, f := range x.found {
		for s := range len(x.world.servers) {
			switch answers := f.answered[s]; {
			case s < c.servers && answers == 0:
				idle++
				x.result.Note("%s with %d servers: no answers from server %d", c.way, c.servers, s)
			case s >= c.servers:
				strange += answers
			}
		}
	}
	x.result.Set("idle_servers", float64(idle))
	x.add("wrong_answers", float64(strange))
	x.result.Set("fe_dropped", float64(x.world.dropped))
	latency := func(f *finding) []float64 { return f.p50 }
	up := func(f *finding) []float64 { return f.up }
	down := func(f *finding) []float64 { return f.down }
	x.ratio("fe_latency_ratio_haproxy", haproxyWay, latency)
	x.ratio("fe_latency_ratio_direct", directWay, latency)
	x.ratio("fe_throughput_ratio_haproxy", haproxyWay, up)
	x.ratio("fe_throughput_ratio_direct", directWay, up)
	x.ratio("fe_throughput_down_ratio_haproxy", haproxyWay, down)
	x.ratio("fe_throughput_down_ratio_direct", directWay, down)
}

// ratio sets the median, over all rounds and numbers of servers, of weir's value relative to another way's
// in the same round. Without a measurement of the other way the metric is missing, and the claim fails.
func (x *experiment) ratio(metric, other string, of func(*finding) []float64) {
	var all []float64
	for _, n := range x.servers {
		ours, theirs := x.found[cell{weirWay, n}], x.found[cell{other, n}]
		if ours == nil || theirs == nil {
			return
		}
		var each []float64
		for i, v := range of(ours) {
			each = append(each, v/of(theirs)[i])
		}
		x.result.Set(fmt.Sprintf("%s_%d", metric, n), median(each))
		all = append(all, each...)
	}
	x.result.Set(metric, median(all))
}

func (x *experiment) claims() {
	for _, c := range []struct{ claim, metric, want string }{
		{"answered requests", "requests", "> 100"},
		{"wrong answers, or answers of a server without a connection", "wrong_answers", "== 0"},
		{"bytes moved both ways", "bytes_moved", "> 1000000"},
		{"bytes sent and not received", "bytes_lost", "== 0"},
		{"servers without an answer in all rounds of a way", "idle_servers", "== 0"},
		{"packets dropped by the load balancer", "fe_dropped", "== 0"},
	} {
		x.result.Claim(lab.Correctness, c.claim, c.metric, c.want)
	}
	if !x.judged {
		return
	}
	for _, c := range []struct{ claim, metric, want string }{
		{"p50 of a request and its answer, relative to HAProxy", "fe_latency_ratio_haproxy", "<= 0.5"},
		{"throughput, relative to HAProxy", "fe_throughput_ratio_haproxy", ">= 1.5"},
		{"throughput, relative to plain routing", "fe_throughput_ratio_direct", ">= 0.9"},
	} {
		x.result.Claim(lab.Performance, c.claim, c.metric, c.want)
	}
}

// median sorts a copy. For an even number it returns the mean of the middle two.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

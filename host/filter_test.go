// SPDX-License-Identifier: Apache-2.0

package host

import (
	"reflect"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"github.com/weir-project/weir/kernel/probe"
)

const withFilter = `
services:
  telemetry: {listen: [udp 0.0.0.0:4739], steer: {slots: 1}, members: [{slot: 0, pid: %d}]}
filter:
  - name: guarded
    hook: nft
    rules: [{name: others, match: 'udp.dstport == 4739 and ip.src != 127.0.0.5', action: drop}]
`

// Features work together in one file, one status and one page of metrics.
func TestFilterBesideServices(t *testing.T) {
	nstest.NeedRoot(t)
	if err := hook.NFTMatch.Check(); err != nil {
		t.Skip("need: kernel:", err)
	}
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	both := w.config(withFilter, pid)
	steps := w.apply(both)
	if len(steps) != 3 || !strings.HasPrefix(steps[2], "create filter guarded: 1 rule at nft input, priority 0, in net:[") {
		t.Errorf("steps %q", steps)
	}
	wantSteps(t, w.apply(both))
	heard(t, "127.0.0.5:0", "127.0.0.1:4739")
	heard(t, "127.0.0.6:0", "127.0.0.1:4739")
	heard(t, "127.0.0.7:0", "127.0.0.1:4739")
	st, err := w.Reader("/nonexistent").Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	steered, _ := Part[state.State](st, spec.Name)
	ours, _ := Part[filter.State](st, filter.Name)
	if v := steered.Services[0].Slots[0].Verdicts["udp"]; v.Steered != 1 || len(ours.Filters) != 1 || ours.Filters[0].Rules[0].Packets != 2 {
		t.Errorf("steered %+v, filters %+v", v, ours.Filters)
	}
	s := w.serve()
	if status, body := s.get("/healthz"); status != 200 {
		t.Errorf("/healthz: %d %s", status, body)
	}
	_, body := s.get("/metrics")
	checkMetrics(t, body, `weir_steer_slot_admitted{member="pid [0-9]*",netns="[^"]*",service="telemetry",slot="0"} 1`,
		`weir_filter_packets_total{action="drop",filter="guarded",hook="nft",netns="[^"]*",rule="others"} 2`,
		`weir_filter_packets_total{action="pass",filter="guarded",hook="nft",netns="[^"]*",rule=""} [1-9]`,
		`weir_filter_bytes_total{action="drop",filter="guarded",hook="nft",netns="[^"]*",rule="others"} 58`,
		`weir_filter_last_match_timestamp_seconds{action="drop",filter="guarded",hook="nft",netns="[^"]*",rule="others"} 1`,
		`weir_filter_attached{filter="guarded",netns="[^"]*",place="nftables table inet weir_guarded, input, priority 0"} 1`,
		`weir_filter_up 1`)
	// The socket returns the same as root's reading of the pins.
	theirs, err := Ask[filter.State](t.Context(), remote{s.socket, nil}, filter.Name, "status", nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(theirs.Filters) != 1 || !reflect.DeepEqual(theirs.Filters[0].Rules[0].Packets, ours.Filters[0].Rules[0].Packets) || theirs.Filters[0].Name != "guarded" {
		t.Errorf("over the socket: %+v", theirs)
	}
	if err := w.Remove(t.Context(), "filter", true); err != nil {
		t.Fatal(err)
	}
	st, err = w.Reader("").Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, there := Part[filter.State](st, filter.Name); there {
		t.Errorf("filter removed: %+v", st)
	}
	if s, _ := Part[state.State](st, spec.Name); len(s.Services) != 1 {
		t.Errorf("filter removed: services %+v", s)
	}
	if err := w.Remove(t.Context(), "garde", true); err == nil || !strings.Contains(err.Error(), "want one of steer, guard, filter, keeper, reroute, lb, backend") {
		t.Errorf("a feature that there is not: %v", err)
	}
	if f, _ := (filter.Feature{}).Spec(both.Document()); len(f.Filters) != 1 {
		n := len(f.Filters)
		t.Errorf("%d filters in the file", n)
	}
}

const explained = `
services:
  telemetry:
    listen: [udp 0.0.0.0:4739]
    steer: {slots: 1}
    members: [{slot: 0, pid: %d}]
    guard: {limit: 20kpps}
filter:
  - name: guarded
    hook: nft
    at: prerouting
    rules: [{name: others, match: 'udp.dstport == 4739 and ip.src == 127.0.0.6', action: drop}]
`

// An explanation follows the packet: filters, the lookup, the guard. It ends with the packet.
func TestExplainGoesThePacketsWay(t *testing.T) {
	nstest.NeedRoot(t)
	for _, n := range []kernel.Need{hook.NFTMatch, probe.CgroupIngress, probe.CompareAndSwap} {
		if err := n.Check(); err != nil {
			t.Skip("need: kernel:", err)
		}
	}
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	w.apply(w.config(explained, pid))
	for _, c := range []struct {
		from, to, device string
		steps            []string // in this order, among others
		result           string
		pid              int
	}{
		{"127.0.0.5:99", "127.0.0.1:4739", "", []string{"arrival by lo, the interface of the route back", "filter guarded nftables table inet weir_guarded, prerouting, priority 0: the default passes it",
			"connected sockets none", "guard of service telemetry limit 20kpps, at its sockets, 0 % of its burst used; at this moment a packet from 127.0.0.5 passes"}, "slot 0", pid},
		{"127.0.0.6:99", "127.0.0.1:4739", "lo", []string{"arrival by lo", "rule 1 (others) drops it"}, "dropped: rule 1 (others) of filter guarded", 0},
		{"192.0.2.1:99", "127.0.0.1:4739", "", []string{"arrival no route leads back to 192.0.2.1"}, "slot 0", pid},
	} {
		p, err := feature.ParsePacket("udp", c.from, c.to)
		if err != nil {
			t.Fatal(err)
		}
		p.Interface = c.device
		x, err := w.Explain(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		i := 0
		for _, s := range x.Steps {
			if i < len(c.steps) && strings.Contains(s.Step+" "+s.Text, c.steps[i]) {
				i++
			}
		}
		if i < len(c.steps) || !strings.HasPrefix(x.Result, c.result) || x.PID != c.pid {
			t.Errorf("from %s: want %q at its place and %q of %d, got %+v", c.from, c.steps[min(i, len(c.steps)-1)], c.result, c.pid, x)
		}
	}
}

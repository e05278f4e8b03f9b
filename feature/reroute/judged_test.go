// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// A link found down by BFD is used again when its BFD session is removed, because nothing would ever find it up.
func TestNobodyJudges(t *testing.T) {
	w := newWorld(t)
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	text := w.bothByBFD()
	w.apply(text)
	w.bothUp()
	a, b := w.cut(w.r1, "r12"), w.cut(w.r2, "r21")
	defer a.Close()
	defer b.Close()
	w.links("both ends reroute", func(p protect.PathState) bool { return p.Down && p.Probe })
	w.apply(strings.ReplaceAll(text, "interval: 10ms", "interval: 10ms, observe: true"))
	if st := w.state(); len(st.BFD) != 2 || st.BFD[0].State == bfd.Up || st.Paths[0].Probe || st.Paths[1].Probe {
		t.Errorf("links of sessions that observe: %+v", st)
	}
	w.apply(text)
	w.links("both ends reroute again", func(p protect.PathState) bool { return p.Down && p.Probe })
	w.apply(strings.ReplaceAll(text, "    bfd:", "    # bfd:"))
	if st := w.state(); len(st.BFD) != 0 || st.Paths[0].Down || st.Paths[1].Down {
		t.Errorf("links without sessions: %+v", st)
	}
}

// A link for a session of bfdd has no judge without bfdd: state, doctor and metric report it.
func TestFRRAbsent(t *testing.T) {
	w := newWorld(t)
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	w.apply(fmt.Sprintf(`
reroute:
  - {name: frr, netns: %[1]s, frr: "unix:%[2]s/absent"}
  - {name: around, netns: %[1]s, interface: r13, repairs: [{interface: r12, via: "fd00:12::2"}]}
  - name: there
    netns: %[1]s
    interface: r12
    repairs: [{segments: [fc00:3::e, fc00:2::d6], interface: r13, via: fd00:13::3}]
    bfd: {peer: fd00:12::2, frr: true}
`, w.name[w.r1], t.TempDir()))
	st := w.state()
	if len(st.BFD) != 1 || !st.BFD[0].Unjudged || st.BFD[0].Name != "there" {
		t.Errorf("sessions %+v", st.BFD)
	}
	var metric []string
	for _, p := range st.Paths {
		path(p, func(d *prometheus.Desc, _ prometheus.ValueType, v float64, labels ...string) {
			if d == unjudgedDesc {
				metric = append(metric, fmt.Sprint(labels[0], " ", v))
			}
		})
	}
	slices.Sort(metric)
	if want := []string{"around 0", "there 1"}; !slices.Equal(metric, want) {
		t.Errorf("metric %q, want %q", metric, want)
	}
	found, err := Feature{}.Examine(t.Context(), w.root)
	if err != nil || !slices.ContainsFunc(found, func(f feature.Finding) bool {
		return f.Object == "BFD session there" && strings.Contains(f.Text, "nobody judges link r12") && strings.Contains(f.Remedy, "--dplaneaddr unix:")
	}) {
		t.Errorf("doctor says %+v, %v", found, err)
	}
}

// Apply, state and doctor name a missing interface for each kind of judge of a path. None blames the peer or bfdd.
func TestMissingInterface(t *testing.T) {
	w := newWorld(t)
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	for judge, entry := range map[string]string{
		"none":    `repairs: [{interface: r13, via: "fd00:13::3"}]`,
		"probe":   "probe: {id: 7, peer: fc00:2::bf, via: fd00:12::2, source: fd00:12::1, function: fc00:1::bf, key_file: " + w.key("sixteen octets..") + "}",
		"bfd":     `bfd: {peer: fd00:12::2}`,
		"bfd frr": `bfd: {peer: fd00:12::2, frr: true}`,
	} {
		t.Run(judge, func(t *testing.T) {
			text := fmt.Sprintf(`
reroute:
  - {name: frr, netns: %[1]s, frr: "unix:%[2]s/absent"}
  - {name: core, netns: %[1]s, interface: r21, %[3]s}
`, w.name[w.r1], t.TempDir(), entry)
			plan, err := Feature{}.Plan(t.Context(), State{}, w.parse(text))
			if err != nil {
				t.Fatal(err)
			}
			want := "there is no interface r21"
			if warnings := strings.Join(plan.Warnings, "\n"); !strings.Contains(warnings, want) {
				t.Errorf("the plan warns %q", plan.Warnings)
			}
			w.apply(text)
			st := w.state()
			failures := st.Failures()
			if !slices.ContainsFunc(failures, func(f feature.Finding) bool { return strings.Contains(f.Text, want) && f.Remedy != "" }) || st.Empty() {
				t.Errorf("failures %+v", failures)
			}
			for _, f := range failures {
				if strings.Contains(f.Text+f.Remedy, "bfdd") {
					t.Errorf("bfdd is blamed: %+v", f)
				}
			}
		})
	}
}

// A session handed over by a real bfdd judges the link of a path with bfd.frr, while it exists.
func TestFRRJudges(t *testing.T) {
	w := newWorld(t)
	frrtest.Need(t, "bfdd")
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	peer := func(local, peer, device string) map[string]string { // tolerates the daemon's own stalls
		return map[string]string{"bfdd": fmt.Sprintf("bfd\n peer %s local-address %s interface %s\n  detect-multiplier 50\n  receive-interval 20\n  transmit-interval 20\n exit\n", peer, local, device)}
	}
	near := frrtest.Start(t, w.r1, "near", peer("fd00:12::1", "fd00:12::2", "r12"), "--dplaneaddr", "unix:{home}/dplane")
	frrtest.Start(t, w.r2, "far", peer("fd00:12::2", "fd00:12::1", "r21"))
	text := fmt.Sprintf(`
reroute:
  - {name: frr, netns: %[1]s, frr: "unix:%[2]s/dplane"}
  - name: there
    netns: %[1]s
    interface: r12
    repairs: [{segments: [fc00:3::e, fc00:2::d6], interface: r13, via: fd00:13::3}]
    bfd: {peer: fd00:12::2, frr: true}
`, w.name[w.r1], near.Home)
	w.apply(text)
	var log nstest.Log
	said := func(what string) {
		t.Helper()
		w.eventually("the log tells it: "+what, func() bool { return log.Has(what) })
	}
	var stop func()
	run := func() {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() {
			done <- Feature{}.Run(ctx, w.root, slog.New(slog.NewTextHandler(io.MultiWriter(w.Output(), &log), nil)))
		}()
		stop = func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	run()
	// Until both ends use their intervals, packets are a second apart (RFC 5880 section 6.8.3), and fifty of them are
	// almost a minute.
	up := func() bool {
		st := w.state()
		return len(st.BFD) == 1 && st.BFD[0].Name == "there" && st.BFD[0].FRR != "" && st.BFD[0].State == bfd.Up &&
			st.BFD[0].Interval == 20*time.Millisecond && st.BFD[0].Detection == time.Second && !st.Paths[0].Unjudged
	}
	w.eventually("the session is up", up)
	rerouted := func(p protect.PathState) bool { return p.Down && p.Probe }
	used := func(p protect.PathState) bool { return p.Attached && !p.Down }
	link := func(what string, ok func(p protect.PathState) bool) {
		t.Helper()
		w.eventually(what, func() bool { st := w.state(); return len(st.Paths) == 1 && ok(st.Paths[0]) })
	}
	s := w.stream()
	w.flows(s)
	cut := w.cut(w.r2, "r21")
	link("what is cut is rerouted", rerouted)
	said(`msg="connected to bfdd"`)
	said(`msg="BFD session is up" path=there interface=r12 peer=fd00:12::2 frr=true`)
	said(`msg="BFD session is down" path=there interface=r12 peer=fd00:12::2 frr=true`)
	w.flows(s)
	cut.Close()
	link("the link is used again", used)
	w.eventually("the session is up again", up)
	cut = w.cut(w.r2, "r21")
	defer func() { cut.Close() }()
	link("what is cut again is rerouted again", rerouted)
	if steps := w.apply(strings.ReplaceAll(text, "    bfd:", "    # bfd:")); len(steps) != 1 || !strings.Contains(steps[0], "link judged by FRR there removed") {
		t.Errorf("%q", steps)
	}
	link("nobody judges the link", used)
	w.apply(text)
	link("somebody does again", rerouted)
	stop()
	link("nobody runs the sessions", func(p protect.PathState) bool { return used(p) && p.Unjudged })
	run()
	cut.Close()
	w.eventually("the session is up with another process", up)
	cut = w.cut(w.r2, "r21")
	link("and judges the link", rerouted)
	stop()
}

// The kernel sends echo packets for a real bfdd with echo configured.
func TestFRREchoes(t *testing.T) {
	w := newWorld(t)
	frrtest.Need(t, "bfdd")
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	config := func(local, peer, device string) map[string]string {
		return map[string]string{"bfdd": fmt.Sprintf("bfd\n peer %s local-address %s interface %s\n  detect-multiplier 50\n  receive-interval 20\n  transmit-interval 20\n  echo-mode\n  echo transmit-interval 20\n  echo receive-interval 30\n exit\n", peer, local, device)}
	}
	near := frrtest.Start(t, w.r1, "near", config("fd00:12::1", "fd00:12::2", "r12"), "--dplaneaddr", "unix:{home}/dplane")
	frrtest.Start(t, w.r2, "far", config("fd00:12::2", "fd00:12::1", "r21"))
	w.apply(fmt.Sprintf("reroute:\n  - {name: frr, netns: %s, frr: \"unix:%s/dplane\"}\n", w.name[w.r1], near.Home))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Feature{}.Run(ctx, w.root, slog.New(slog.NewTextHandler(w.Output(), nil))) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	w.eventually("echo comes back", func() bool {
		st := w.state()
		return len(st.BFD) == 1 && st.BFD[0].Echo != nil && st.BFD[0].Echo.Interval == 30*time.Millisecond && st.BFD[0].Echo.Returned > 20
	})
}

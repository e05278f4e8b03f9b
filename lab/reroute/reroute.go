// SPDX-License-Identifier: Apache-2.0

// Package reroute cuts links between routers and measures the time until packets take another path. It
// tests the whole feature, set up by weir apply, under real traffic, with forged probes, and with BFD
// daemons independent of weir.
package reroute

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/lab"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "reroute",
		Short: "time until cuts of links, both ways and one way, are detected and packets take another path",
		Run:   runExperiment,
		Next: []string{
			"weir-lab run reroute --quick --json   the findings for a program",
			"weir-lab run reroute-stress           links without cuts, on overloaded routers",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	both, oneway int           // cuts of both directions, and of each direction alone
	forging      time.Duration // duration of forged probes
	talk         time.Duration // minimum time for BFD sessions to stay up
	echoes       int           // cuts of a link with BFD echo
}

var plans = map[lab.Size]plan{
	lab.Full:  {both: 100, oneway: 50, forging: 2 * time.Second, talk: 30 * time.Second, echoes: 40},
	lab.Quick: {both: 20, oneway: 10, forging: time.Second, talk: 15 * time.Second, echoes: 10},
	lab.Smoke: {both: 4, oneway: 2, forging: 300 * time.Millisecond, talk: 3 * time.Second, echoes: 1},
}

type experiment struct {
	plan
	env    *lab.Env
	result *lab.Result
	world  *world
	events chan event
	stream *stream
	bfd    *bfdSide

	forged int // forged probes sent

	cuts, detected        int
	cutsOneway, detectOne int
	main, second, farMain []time.Duration // from the cut to the verdict
	moments               []uint64        // of the cuts of main, CLOCK_MONOTONIC, ns
	lost                  []float64       // packets, by cut
}

func runExperiment(ctx context.Context, e *lab.Env, r *lab.Result) error {
	x := &experiment{plan: plans[e.Size], env: e, result: r}
	host := lab.WatchHost()
	err := r.WithStalls(func() error {
		if err := x.build(ctx); err != nil {
			return err
		}
		begin := time.Now()
		if err := x.cutAll(ctx); err != nil {
			return err
		}
		if err := x.forge(ctx); err != nil {
			return err
		}
		if err := x.echo(ctx); err != nil {
			return err
		}
		return x.interop(ctx, begin)
	})
	host.Stop()
	if err != nil {
		return err
	}
	x.stalls(host)
	x.report()
	return nil
}

// calm is the longest stall of the host during a cut counted as undisturbed. After a longer stall a session
// delays its verdict (LIVENESS_LATE), repeatedly if needed.
const calm = 1500 * time.Microsecond

// stalls reports the host's stall within the longest detection, and the longest detection of cuts without
// stalls.
func (x *experiment) stalls(host *lab.Stalls) {
	var longest, longestCalm, stood time.Duration
	var calmCuts int
	for i, took := range x.main {
		s := host.Within(x.moments[i], x.moments[i]+uint64(took))
		if took > longest {
			longest, stood = took, s
		}
		if s <= calm {
			calmCuts++
			longestCalm = max(longestCalm, took)
		}
	}
	x.result.Set("host_stood_still_ms_in_longest_10x3", float64(stood.Microseconds())/1000)
	x.result.Set("cuts_of_calm_host", float64(calmCuts))
	if calmCuts > 0 {
		x.result.Set("detect_ms_max_10x3_of_calm_host", float64(longestCalm.Microseconds())/1000)
	}
}

func (x *experiment) say(format string, a ...any) { x.env.Watch.Log(format, a...) }

func (x *experiment) build(ctx context.Context) (err error) {
	x.say("a triangle of routers, probed and protected; BFD sessions with the installed daemons")
	if x.world, err = newWorld(ctx, x.env); err != nil {
		return err
	}
	if err := x.world.configure(ctx); err != nil {
		return err
	}
	if x.bfd, err = x.startBFD(ctx); err != nil {
		return err
	}
	if err := x.world.all(ctx, "both links are up at both ends", up); err != nil {
		return err
	}
	if err := x.listen(ctx); err != nil {
		return err
	}
	x.stream, err = newStream(x.env, x.world.s, x.world.d)
	return err
}

// cut is a kind of cut.
type cut struct {
	name       string
	atR1, atR2 bool // ends losing incoming packets
}

var (
	bothWays = cut{"both ways", true, true}
	outwards = cut{"out", false, true} // r2 receives nothing more
	inwards  = cut{"in", true, false}
)

func (x *experiment) cutAll(ctx context.Context) error {
	for _, k := range []struct {
		cut
		times int
	}{{bothWays, x.both}, {outwards, x.oneway}, {inwards, x.oneway}} {
		x.say("%d cuts %s", k.times, k.name)
		for n := range k.times {
			// Vary the position between two probes.
			time.Sleep(time.Duration(n%10) * time.Millisecond)
			if err := x.once(ctx, k.cut); err != nil {
				return err
			}
		}
	}
	return nil
}

// patience is the longest time to a verdict; later the cut counts as undetected.
const patience = 30 * time.Second

// once cuts both links, waits for the verdicts, and restores the links.
func (x *experiment) once(ctx context.Context, c cut) error {
	x.drainEvents()
	before := x.stream.lost()
	moment, err := x.world.main.cut(c.atR1, c.atR2)
	if err != nil {
		return err
	}
	momentSecond, err := x.world.second.cut(c.atR1, c.atR2)
	if err != nil {
		return err
	}
	seen := x.verdicts(moment)
	near, okNear := seen[verdict{true, idMain}]
	far, okFar := seen[verdict{false, idMain}]
	second, okSecond := seen[verdict{true, idSecond}]
	told := okNear && okFar
	if c == bothWays {
		x.cuts++
		if told && okSecond {
			x.detected++
			x.main, x.farMain, x.moments = append(x.main, near), append(x.farMain, far), append(x.moments, moment)
			x.second = append(x.second, second-time.Duration(momentSecond-moment))
		}
	} else {
		x.cutsOneway++
		if right, err := x.direction(ctx, c); err != nil {
			return err
		} else if told && right {
			x.detectOne++
		}
	}
	time.Sleep(30 * time.Millisecond) // rerouted packets arrive
	if c == bothWays {
		x.lost = append(x.lost, float64(x.stream.lost()-before))
	}
	if _, err := x.world.main.cut(false, false); err != nil {
		return err
	}
	if _, err := x.world.second.cut(false, false); err != nil {
		return err
	}
	return x.world.all(ctx, "both links are up again", up)
}

// direction reports whether the end still receiving shows its outgoing direction as down.
func (x *experiment) direction(ctx context.Context, c cut) (bool, error) {
	hears := x.world.names[x.world.r1]
	if c == inwards {
		hears = x.world.names[x.world.r2]
	}
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		st, err := liveness.ReadState(ctx, x.world.root)
		if err != nil {
			return false, err
		}
		for _, s := range st.Sessions {
			if s.Name == "main" && s.Netns == hears && s.In == liveness.Works && s.Out == liveness.Broken {
				return true, nil
			}
		}
	}
	return false, nil
}

func (x *experiment) report() {
	r := x.result
	r.Set("cuts", float64(x.cuts))
	r.Set("detected", float64(x.detected))
	r.Set("cuts_oneway", float64(x.cutsOneway))
	r.Set("detect_oneway", float64(x.detectOne))
	r.Set("undetected", float64(x.cuts-x.detected))
	r.Set("undetected_oneway", float64(x.cutsOneway-x.detectOne))
	for name, times := range map[string][]time.Duration{"10x3": x.main, "5x3": x.second, "peer_10x3": x.farMain} {
		if len(times) == 0 {
			continue
		}
		slices.Sort(times)
		ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
		r.Set("detect_ms_min_"+name, ms(times[0]))
		r.Set("detect_ms_p50_"+name, ms(times[len(times)/2]))
		r.Set("detect_ms_max_"+name, ms(times[len(times)-1]))
	}
	if len(x.lost) > 0 {
		slices.Sort(x.lost)
		r.Set("packets_lost_per_cut_p50", x.lost[len(x.lost)/2])
		r.Set("packets_lost_per_cut_max", x.lost[len(x.lost)-1])
	}
	r.Set("packets_sent", float64(x.stream.sent.Load()))
	least := "> 0"
	if x.env.Size != lab.Smoke {
		least = ">= 20"
	}
	for _, c := range []struct {
		kind                lab.Kind
		claim, metric, want string
	}{
		{lab.Correctness, "cuts of both directions", "cuts", least},
		{lab.Correctness, "cuts of both directions not detected by both ends", "undetected", "== 0"},
		{lab.Correctness, "cuts of one direction", "cuts_oneway", "> 0"},
		{lab.Correctness, "cuts of one direction not detected by both ends, or with the wrong direction at the receiving end", "undetected_oneway", "== 0"},
		{lab.Correctness, "forged, replayed or malformed probes with an effect", "forged_accepted", "== 0"},
		{lab.Correctness, "such probes counted by their reason (the kernel itself drops truncated ones)", "forged_counted", fmt.Sprintf(">= %d", x.forged/2)},
		{lab.Performance, "ms from the cut to the verdict, probes every 10 ms, median", "detect_ms_p50_10x3", "<= 36"},
		{lab.Performance, "the same, maximum", "detect_ms_max_10x3", "<= 50"},
		{lab.Performance, "the same, probes every 5 ms, median", "detect_ms_p50_5x3", "<= 20"},
		{lab.Correctness, "daemons with kernel BFD up: bfdd, BIRD", "bfd_interop_peers", fmt.Sprintf("== %d", x.bfd.wanted())},
		{lab.Performance, "downs of these sessions", "bfd_interop_flaps", "== 0"},
	} {
		if x.env.Size != lab.Smoke || c.kind == lab.Correctness {
			r.Claim(c.kind, c.claim, c.metric, c.want)
		}
	}
}

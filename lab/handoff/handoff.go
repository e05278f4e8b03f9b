// SPDX-License-Identifier: Apache-2.0

// Package handofflab tests handoff: sessions move between servers while all bytes of their streams are
// verified.
package handofflab

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/delay"
	"github.com/weir-project/weir/lab/onehost"
	"github.com/weir-project/weir/lab/topo"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "handoff",
		Short: "live TCP sessions moved between four servers, every byte verified",
		Run:   runHandoff,
		Next: []string{
			"weir handoff status                   the sessions of a keeper",
			"weir-lab run handoff-crash --quick    the same, with kill -9 at every step",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	hosts, sessions int
	moves           int
	pause           time.Duration // between two moves
	others          int           // moves in each of the variants
	bmp             onehost.BMPOptions
	kills           int
}

var plans = map[lab.Size]plan{
	lab.Full: {hosts: 4, sessions: 8, moves: 5000, pause: 4 * time.Millisecond, others: 200,
		bmp: onehost.BMPOptions{Routes: 5000, Moves: 50, Kills: 20, PlainKills: 5}, kills: 200},
	lab.Quick: {hosts: 4, sessions: 4, moves: 1000, pause: 4 * time.Millisecond, others: 15,
		bmp: onehost.BMPOptions{Routes: 2000, Moves: 10, Kills: 4, PlainKills: 1}, kills: 50},
	lab.Smoke: {hosts: 3, sessions: 3, moves: 60, pause: 4 * time.Millisecond, others: 6,
		bmp: onehost.BMPOptions{Routes: 500, Moves: 2, Kills: 1, PlainKills: 1}, kills: 5},
}

// runHandoff runs the experiment.
func runHandoff(ctx context.Context, e *lab.Env, r *lab.Result) error {
	p := plans[e.Size]
	if err := r.WithStalls(func() error { return p.run(ctx, e, r) }); err != nil {
		return err
	}
	for _, v := range variants {
		v := v
		v.plan = plan{hosts: 2, sessions: 2, moves: p.others * max(1, v.times) / max(1, v.share), pause: max(p.pause, v.pause)}
		if err := v.run(ctx, e, r); err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
	}
	if err := p.oneHost(ctx, e, r); err != nil {
		return err
	}
	for _, c := range []struct {
		kind                lab.Kind
		claim, metric, want string
	}{
		{lab.Correctness, "sessions moved between servers", "migrations", fmt.Sprintf(">= %d", p.moves)},
		{lab.Correctness, "resets seen by clients", "resets_seen", "== 0"},
		{lab.Correctness, "bytes lost", "bytes_lost", "== 0"},
		{lab.Correctness, "bytes received twice", "bytes_duplicated", "== 0"},
		{lab.Correctness, "moved sessions over a line of 40 ms with 1 % loss", "lossy_migrations", fmt.Sprintf(">= %d", p.others)},
		{lab.Correctness, "failed streams over this line", "lossy_failed", "== 0"},
		{lab.Correctness, "moved sessions with packets parked at the source", "parked_migrations", fmt.Sprintf(">= %d", 10*p.others)},
		{lab.Correctness, "failed streams with parked packets", "parked_failed", "== 0"},
		{lab.Correctness, "failed streams with full queues, of 64 KiB and of the kernel's maximum", "filled_failed", "== 0"},
		{lab.Correctness, "moves with a gap above 20 ms, excluding the machine's own stalls", "client_stalls_over_20ms", "== 0"},
		{lab.Correctness, "kills of servers under streams on one host", "sigkills", fmt.Sprintf(">= %d", p.kills)},
		{lab.Correctness, "kills noticed by a stream", "sigkills_noticed", "== 0"},
		{lab.Performance, "duration of a move, 64 KiB buffers, median", "transfer_ms_p50", "<= 1"},
		{lab.Performance, "duration of a move, 99th percentile", "transfer_ms_p99", "<= 2.5"},
		{lab.Performance, "longest gap between bytes around a move, 99th percentile", "client_stall_ms_p99", "<= 4"},
	} {
		if e.Size == lab.Smoke && (c.kind == lab.Performance || c.metric == "client_stalls_over_20ms") {
			continue
		}
		r.Claim(c.kind, c.claim, c.metric, c.want)
	}
	if _, ok := r.Metrics["bmp_redumps"]; ok {
		r.Claim(lab.Correctness, "tables repeated by a real router, over moves and kills of its collector", "bmp_redumps", "== 0")
	}
	return nil
}

// run moves sessions between servers.
func (p plan) run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	// The clients run in this process, and its own work must not appear as their gaps. Threads waiting in
	// the kernel keep their Ps for a while. With no P left, Go's monitor wakes every 20 µs to retake them:
	// a tenth of a CPU. Garbage is collected only at the memory limit.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(1 << 30)
	runtime.GOMAXPROCS(8)
	w, err := newWorld(e, "main", p.hosts)
	if err != nil {
		return err
	}
	e.Watch.Log("%d servers behind a load balancer, each with weir serve and a member", p.hosts)
	if err := w.start(); err != nil {
		return err
	}
	defer w.stop()
	m := &migration{world: w, plan: p, rand: rand.New(rand.NewPCG(e.Seed, 2))}
	machine := lab.WatchStalls()
	err = m.run(ctx)
	machine.Stop()
	if err == nil {
		err = m.report(r)
	}
	if err != nil {
		return err
	}
	m.reportStalls(r, machine)
	return nil
}

// oneHost tests sessions with killed processes on one host, and sessions of a real router.
func (p plan) oneHost(ctx context.Context, e *lab.Env, r *lab.Result) error {
	e.Watch.Log("%d kills under streams", p.kills)
	s, err := onehost.Stream(ctx, e, p.kills)
	if err != nil {
		return err
	}
	for metric, n := range map[string]int{"sigkills": s.Kills, "sigkill_survived": s.Survived, "sigkills_noticed": s.Kills - s.Survived, "sigkill_resets": s.Resets, "sigkill_wrong": s.Wrong} {
		r.Set(metric, float64(n))
	}
	for metric, d := range map[string]time.Duration{"sigkill_stall_ms_p50": s.StallP50, "sigkill_stall_ms_p99": s.StallP99, "sigkill_stall_calm_ms": s.Calm, "sigkill_start_ms_p50": s.StartP50} {
		r.Set(metric, float64(d.Microseconds())/1000)
	}
	for _, n := range s.Notes {
		r.Note("streams: %s", n)
	}
	if missing := onehost.BMPMissing(); len(missing) > 0 {
		r.Skip("a real router's BMP session: %v is not installed", missing)
		return nil
	}
	e.Watch.Log("a real router, %d moves and %d kills of its collector", p.bmp.Moves, p.bmp.Kills)
	b, err := onehost.BMP(ctx, e, p.bmp)
	if err != nil {
		return err
	}
	for metric, n := range map[string]int{"bmp_redumps": b.Redumps, "bmp_sessions": b.SessionsOpened, "bmp_moves": b.Moves, "bmp_kills": b.Kills, "bmp_rescued": b.Rescued, "bmp_wrong": b.Wrong,
		"bmp_routes": b.Routes, "bmp_redumps_without": b.PlainRedumps, "bmp_kills_without": b.PlainKills} {
		r.Set(metric, float64(n))
	}
	for _, n := range b.Notes {
		r.Note("BMP: %s", n)
	}
	return nil
}

// variant is the experiment under other conditions, with its own correctness claims.
type variant struct {
	plan
	name   string
	buffer int // as in world
	state  int
	size   int // bytes of a client's message
	pause  time.Duration
	share  int // divisor of the variants' number of moves; 0: no division
	times  int // factor for the number of moves; 0: once
	park   bool
	line   *delay.Line
}

var variants = []variant{
	{name: "parked", buffer: 64 << 10, times: 10, park: true},
	// A session moving again before its first packet from the peer has no estimate of the line, and waits 3
	// s for lost packets.
	{name: "lossy", buffer: 64 << 10, size: 2000, pause: 100 * time.Millisecond, line: &delay.Line{Delay: 20 * time.Millisecond, Loss: 0.01}}, // there and back: 40 ms
	{name: "filled", buffer: 64 << 10, size: 256 << 10},
	// Unread bytes move beside the socket, and its buffer then fills again. Members therefore read between
	// two moves.
	{name: "large", size: 4 << 20, state: 64 << 20, pause: 200 * time.Millisecond, share: 2},
}

func (v *variant) run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	e.Watch.Log("%s: %d moves", v.name, v.moves)
	w, err := newWorld(e, v.name, v.hosts)
	if err != nil {
		return err
	}
	w.buffer, w.state, w.park = v.buffer, v.state, v.park
	if v.line != nil {
		w.cable = func(client, lb topo.End) error {
			_, err := delay.New(e, client, lb, *v.line)
			return err
		}
	}
	if err := w.start(); err != nil {
		return err
	}
	defer w.stop()
	m := &migration{world: w, plan: v.plan, rand: rand.New(rand.NewPCG(e.Seed, 3)), size: v.size}
	if err := m.run(ctx); err != nil {
		return err
	}
	one := lab.NewResult(v.name, e.Size, e.Seed)
	if err := m.report(one); err != nil {
		return err
	}
	for _, n := range one.Notes {
		r.Note("%s: %s", v.name, n)
	}
	for _, metric := range []string{"migrations", "came_back", "bytes", "session_bytes", "packets_parked", "transfer_ms_p50", "transfer_ms_p99", "client_stall_ms_p50", "client_stall_ms_p99"} {
		r.Set(v.name+"_"+metric, one.Metrics[metric])
	}
	failed := one.Metrics["failed"]
	if v.name == "large" { // the claim covers both
		r.Set("filled_failed", r.Metrics["filled_failed"]+failed)
	} else {
		r.Set(v.name+"_failed", failed)
	}
	return nil
}

// migration holds clients with moving sessions.
type migration struct {
	*world
	plan
	rand    *rand.Rand
	size    int // bytes of a client's message; 0: a stream of small ones
	clients []*client
	at      []int // the server of each client's session

	moved int
	back  int // moves ended at their source
	spans []span
	shown []time.Duration // from the order until the member holds the session
}

// span is a move of a client's session, including the following pause.
type span struct {
	client       *client
	began, ended time.Time
}

// wait is a precise time.Sleep.
func wait(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	for errors.Is(unix.Nanosleep(&ts, &ts), unix.EINTR) {
	}
}

// calm returns a period before the span without moves, of the same length. If the move took longer than a
// pause, most of the period is without moves. It excludes the gap in which the move begins.
func (s span) calm() (from, to time.Time) {
	to = s.began.Add(-2 * time.Millisecond)
	return to.Add(-s.ended.Sub(s.began)), to
}

func (m *migration) run(ctx context.Context) error {
	for i := range m.plan.sessions {
		c, err := m.dial(m.env.Seed + uint64(i))
		if err != nil {
			return err
		}
		if m.size > 0 {
			c.size = m.size
		}
		m.clients = append(m.clients, c)
	}
	flows, err := m.flows()
	if err != nil {
		return err
	}
	for _, c := range m.clients {
		at := 0
		for _, f := range flows {
			if f.Client.String() == c.remote {
				at = int(f.Owner)
			}
		}
		if at == 0 {
			return fmt.Errorf("the load balancer has no flow of %s", c.remote)
		}
		m.at = append(m.at, at)
	}
	if err := stream(ctx, m.clients...); err != nil {
		return err
	}
	time.Sleep(200 * time.Millisecond)
	for tries := 0; m.moved < m.moves && tries < 2*m.moves; tries++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := m.move(ctx, tries%len(m.clients)); err != nil {
			return err
		}
		if m.moved%100 == 0 {
			m.env.Watch.Log("%d of %d moves", m.moved, m.moves)
		}
	}
	time.Sleep(100 * time.Millisecond)
	return nil
}

// move moves one client's session to another server.
func (m *migration) move(ctx context.Context, i int) error {
	c := m.clients[i]
	from := m.servers[m.at[i]-1]
	to := m.at[i] + 1 + m.rand.IntN(len(m.servers)-1)
	if to > len(m.servers) {
		to -= len(m.servers)
	}
	dest := m.servers[to-1]
	if m.size == 0 {
		c.dense.Store(true)
		defer c.dense.Store(false)
	}
	// Wait twice as long as after the move, to record the stream without moves. The order comes at a random
	// moment between two messages: Go's timers fire when some event wakes a thread, and these events are
	// the clients'.
	wait(2*m.pause + time.Duration(m.rand.Int64N(int64(c.pause))))
	began := time.Now()
	has, back := dest.expect(c.remote), from.expect(c.remote)
	said := len(from.complaints())
	order := func() error {
		_, err := fmt.Fprintf(from.member.in, "move %s @%s\n", c.remote, dest.name())
		return err
	}
	if err := order(); err != nil {
		return err
	}
	look := time.NewTicker(20 * time.Millisecond)
	defer look.Stop()
	for end, there := time.Now().Add(patience), false; !there; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-has:
			there = true
		case <-back: // rejected; the session continues at its source
			m.back++
			return nil
		case <-look.C:
			if from.early(said) {
				said = len(from.complaints())
				if err := order(); err != nil {
					return err
				}
			}
			if time.Now().After(end) {
				return fmt.Errorf("%s did not move from %s to %s in %s: %q, %q; agents: %s%s", c.remote, from.name(), dest.name(), patience, from.complaints(), dest.complaints(), from.agent.errs, dest.agent.errs)
			}
		}
	}
	m.shown = append(m.shown, time.Since(began))
	m.at[i] = to
	m.moved++
	time.Sleep(m.pause)
	m.spans = append(m.spans, span{c, began, time.Now()})
	return nil
}

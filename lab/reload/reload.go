// SPDX-License-Identifier: Apache-2.0

// Package reload replaces real servers under load, again and again: nginx (HTTP/1.1 and HTTP/2), knot (DNS)
// and Caddy (HTTP/3 over QUIC). weir steer run --replace starts each new process beside the old one. For
// comparison, it also restarts and reloads the servers without weir.
package reload

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/weir-project/weir/lab"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "reload",
		Short: "nginx, knot and Caddy replaced under load, by weir and by today's means",
		Run:   run,
		Next: []string{
			"weir-lab run reload --without-weir   the same claims for a restart: they fail",
			"weir-lab run reload --quick --json   the findings for a program",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	rounds   int           // of all phases, one after the other
	replaces int           // in each round, of nginx and of knot
	quic     int           // in each round, of Caddy; its clients are waited for
	keep     int           // in each round, of the servers with kept connections
	restarts int           // in each round, of every server, without weir
	hups     int           // in the last round, by SIGHUP, with weir and without
	limit    time.Duration // no further round begins after it
}

var plans = map[lab.Size]plan{
	lab.Full:  {rounds: 12, replaces: 12, quic: 12, keep: 6, restarts: 3, hups: 8, limit: time.Hour},
	lab.Quick: {rounds: 2, replaces: 25, quic: 9, keep: 4, restarts: 1, hups: 2, limit: 44 * time.Second},
	lab.Smoke: {rounds: 1, replaces: 3, quic: 2, keep: 1, restarts: 1, limit: time.Minute},
}

// experiment is one run.
type experiment struct {
	plan
	env    *lab.Env
	result *lab.Result
	tally  map[string]*tally // by way of replacement
}

// tally holds the clients' results of one way to replace a server, over all rounds.
type tally struct {
	http, dns, quic finding
	keep            finding                    // busy connections of HTTP/1.1
	changes         map[string]int             // by server
	spanning        int                        // QUIC connections open during a change of their server
	durations       map[string][]time.Duration // by server
}

// finding counts requests and failures.
type finding struct{ asked, failed int }

func (f *finding) add(o finding) {
	f.asked += o.asked
	f.failed += o.failed
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	for _, program := range []string{"nginx", "knotd", "caddy", "haproxy", "wrk", "dnsperf"} {
		if _, err := lab.Find(program); err != nil {
			r.Skip("%v", err)
			return err
		}
	}
	x := &experiment{plan: plans[e.Size], env: e, result: r, tally: map[string]*tally{}}
	if err := r.WithStalls(func() error { return x.measure(ctx) }); err != nil {
		return err
	}
	x.report()
	return nil
}

// The ways to replace a server.
const (
	byWeir    = "weir"        // weir steer run --replace
	byRestart = "restart"     // end it, wait, start it: like systemctl restart
	byHUP     = "sighup"      // the servers' own reload
	weirHUP   = "weir_sighup" // the same with weir in front
)

// measure goes through all ways in every round, so all meet the same state of the machine.
func (x *experiment) measure(ctx context.Context) error {
	begin := time.Now()
	with, err := newHost(ctx, x.env, "weir", !x.env.Control)
	if err != nil {
		return err
	}
	plain, err := newHost(ctx, x.env, "plain", false)
	if err != nil {
		return err
	}
	with.until, plain.until = begin.Add(x.limit+x.limit/8), begin.Add(x.limit+x.limit/8)
	for round := range x.rounds {
		if time.Since(begin) > x.limit {
			x.result.Note("%d of %d rounds: the machine is too busy for more in time", round, x.rounds)
			break
		}
		x.env.Watch.Log("round %d of %d", round+1, x.rounds)
		for _, p := range []struct {
			way string
			on  *host
			n   map[string]int // changes, by server
		}{
			{byWeir, with, withKeep(map[string]int{"nginx": x.replaces, "knot": x.replaces, "caddy": x.quic}, x.keep)},
			{byRestart, plain, withKeep(map[string]int{"nginx": x.restarts, "knot": x.restarts, "caddy": x.restarts}, x.restarts)},
			// Caddy's own reload is a request, not a signal.
			{weirHUP, with, map[string]int{"nginx": x.hups, "knot": x.hups}},
			{byHUP, plain, map[string]int{"nginx": x.hups, "knot": x.hups}},
		} {
			if p.n["nginx"] == 0 || len(p.n) == 2 && round < x.rounds-1 || time.Now().After(p.on.until) {
				continue
			}
			if err := x.phase(ctx, p.way, p.on, p.n); err != nil {
				return fmt.Errorf("%s: %w", p.way, err)
			}
		}
	}
	return nil
}

// withKeep adds the servers with kept connections.
func withKeep(n map[string]int, changes int) map[string]int {
	for name := range keepPorts {
		n[name] = changes
	}
	return n
}

// phase puts a host under load and changes its servers n times each.
func (x *experiment) phase(ctx context.Context, way string, h *host, n map[string]int) error {
	t := x.tally[way]
	if t == nil {
		t = &tally{changes: map[string]int{}, durations: map[string][]time.Duration{}}
		x.tally[way] = t
	}
	l, err := startLoad(ctx, x.env, h)
	if err != nil {
		return err
	}
	err = h.changeAll(ctx, way, n, t, l)
	found, lerr := l.stop(ctx)
	if err != nil {
		return err
	}
	if lerr != nil {
		return lerr
	}
	t.http.add(found.http)
	t.dns.add(found.dns)
	t.quic.add(found.quic)
	t.keep.add(found.keep)
	for _, text := range l.reasons() {
		x.result.Note("%s: %s", way, text)
	}
	return nil
}

// report turns the counts into metrics and claims.
func (x *experiment) report() {
	r := x.result
	for way, t := range x.tally {
		suffix := "_" + way
		if way == byWeir {
			suffix = ""
		}
		r.Set("http_requests"+suffix, float64(t.http.asked))
		r.Set("http_failed"+suffix, float64(t.http.failed))
		r.Set("dns_queries"+suffix, float64(t.dns.asked))
		r.Set("dns_failed"+suffix, float64(t.dns.failed))
		r.Set("keepalive_requests"+suffix, float64(t.keep.asked))
		r.Set("keepalive_failed"+suffix, float64(t.keep.failed))
		r.Set("quic_connections"+suffix, float64(t.quic.asked))
		r.Set("quic_connections_lost"+suffix, float64(t.quic.failed))
		// The contract covers nginx and knot; Caddy has its own number.
		least := min(t.changes["nginx"], t.changes["knot"])
		for _, s := range kinds {
			name := strings.ReplaceAll(s.name, "-", "_")
			r.Set("reloads_"+name+suffix, float64(t.changes[s.name]))
			if way == byWeir || way == byRestart {
				p50, _, longest := lab.Percentiles(t.durations[s.name])
				r.Set("reload_ms_p50_"+name+suffix, float64(p50.Milliseconds()))
				r.Set("reload_ms_max_"+name+suffix, float64(longest.Milliseconds()))
			}
		}
		if way == byWeir || way == byRestart {
			r.Set("reloads"+suffix, float64(least))
			r.Set("quic_connections_spanning"+suffix, float64(t.spanning))
		}
	}
	least := "50"
	if x.env.Size == lab.Smoke {
		least = fmt.Sprint(x.replaces)
	}
	r.Claim(lab.Correctness, "replacements of nginx and knot, each", "reloads", ">= "+least)
	r.Claim(lab.Correctness, "replacements of Caddy", "reloads_caddy", ">= "+fmt.Sprint(x.quic))
	r.Claim(lab.Correctness, "no HTTP request failed (nginx, HTTP/1.1 and HTTP/2)", "http_failed", "== 0")
	r.Claim(lab.Correctness, "no request failed on busy connections ended by their server (nginx, HAProxy, Caddy, HTTP/1.1)", "keepalive_failed", "== 0")
	r.Claim(lab.Correctness, "no DNS query failed (knot)", "dns_failed", "== 0")
	r.Claim(lab.Correctness, "no QUIC connection was lost (Caddy, HTTP/3)", "quic_connections_lost", "== 0")
	r.Claim(lab.Correctness, "QUIC connections survived replacements of their server", "quic_connections_spanning", "> 0")
}

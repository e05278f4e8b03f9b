// SPDX-License-Identifier: Apache-2.0

// Package handoffpair adds, kills and reboots load balancers of a pair under many real TCP connections.
package handoffpair

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/weir-project/weir/lab"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "handoff-pair",
		Short: "10,000 connections while load balancers of a pair are added, killed and rebooted",
		Run:   run,
		Next: []string{
			"weir-lab run handoff-pair --quick --json   the findings for a program",
		},
	})
}

// connections by size.
var connections = map[lab.Size]int{lab.Full: 10000, lab.Quick: 10000, lab.Smoke: 400}

// pair is one run.
type pair struct {
	*world
	result *lab.Result
	conns  []*connection
	resets int
	lost   int
	wrong  int
	worst  time.Duration // slowest round of all connections
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	w, err := newWorld(e)
	if err != nil {
		return err
	}
	p := &pair{world: w, result: r}
	n := connections[e.Size]
	events := []struct {
		what string
		do   func() error
	}{
		{"adding a load balancer, and changing the path to it", func() error { return p.after(w.add(1), w.by(1)) }},
		{"killing it, with its machine", func() error { return p.after(w.kill(1), w.by(0)) }},
		{"rebooting it without state, and changing the path to it at once", func() error { return p.after(w.reboot(1), w.by(1)) }},
		{"killing the first one, with its machine", func() error { return w.kill(0) }},
		{"rebooting the first one, with the same path", func() error { return p.after(w.reboot(0), w.paired()) }},
		{"killing the other one, with its machine", func() error { return p.after(w.kill(1), w.by(0)) }},
		{"rebooting the only one", func() error { return p.after(w.kill(0), w.reboot(0)) }},
	}
	if err := p.begin(ctx, n); err != nil {
		return err
	}
	for _, event := range events {
		e.Watch.Log(event.what)
		if err := p.through(ctx, event.what, event.do); err != nil {
			return fmt.Errorf("%s: %w", event.what, err)
		}
	}
	for metric, v := range map[string]int{"connections": len(p.conns), "connections_reset": p.resets, "connections_lost": p.lost, "answers_of_another_host": p.wrong,
		"events": len(events), "flows_not_by_hash": p.moved, "pair_records": p.records, "longest_round_ms": int(p.worst.Milliseconds())} {
		r.Set(metric, float64(v))
	}
	for _, c := range []struct{ claim, metric, want string }{
		{"connections through all events", "connections", fmt.Sprintf("== %d", n)},
		{"reset connections", "connections_reset", "== 0"},
		{"connections without an answer within 30 s", "connections_lost", "== 0"},
		{"answers of a host without the connection", "answers_of_another_host", "== 0"},
		{"flows sent to an added load balancer: the third host's share", "flows_not_by_hash", fmt.Sprintf("<= %d", n/2)},
	} {
		r.Claim(lab.Correctness, c.claim, c.metric, c.want)
	}
	return nil
}

// after returns the first error of its steps. The steps have run before the call.
func (p *pair) after(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// begin opens connections by the first load balancer alone, over two hosts. Then a third host arrives, and
// existing connections hashed to it stay at their hosts.
func (p *pair) begin(ctx context.Context, n int) error {
	p.env.Watch.Log("opening %d connections", n)
	if err := p.after(p.add(0), p.by(0), p.host(0), p.host(1)); err != nil {
		return err
	}
	if err := p.open(ctx, n); err != nil {
		return err
	}
	if err := p.round(ctx, "open connections"); err != nil {
		return err
	}
	if err := p.host(2); err != nil {
		return err
	}
	return p.round(ctx, "adding a host")
}

// through makes all connections send during an event, and once more after it.
func (p *pair) through(ctx context.Context, what string, do func() error) error {
	done := make(chan error, 1)
	go func() { done <- do() }()
	if err := p.round(ctx, what); err != nil {
		return err
	}
	if err := <-done; err != nil {
		return err
	}
	return p.round(ctx, what)
}

// round sends a request on each connection and waits for the answers, all in parallel.
func (p *pair) round(ctx context.Context, what string) error {
	begin := time.Now()
	var wg sync.WaitGroup
	var mu sync.Mutex
	resets, lost, wrong := 0, 0, 0
	for _, c := range p.conns {
		if c.over {
			continue
		}
		wg.Go(func() {
			v := c.ask()
			mu.Lock()
			defer mu.Unlock()
			switch v {
			case wasReset:
				resets++
			case wasLost:
				lost++
			case isWrong:
				wrong++
			}
		})
	}
	wg.Wait()
	took := time.Since(begin)
	p.resets, p.lost, p.wrong, p.worst = p.resets+resets, p.lost+lost, p.wrong+wrong, max(p.worst, took)
	if resets+lost+wrong > 0 {
		p.result.Note("%s: %d reset, %d lost, %d answered by another host", what, resets, lost, wrong)
	}
	p.env.Watch.Log("%d connections answered within %s", len(p.conns)-resets-lost-wrong, took.Round(time.Millisecond))
	return ctx.Err()
}

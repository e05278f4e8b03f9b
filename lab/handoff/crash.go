// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/move/explore"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/lab"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "handoff-crash",
		Short: "kill -9 at every step of a session's move between two servers, and a model of the move",
		Run:   runCrash,
	})
}

// crashes moves sessions between two servers while processes are killed.
type crashes struct {
	*world
	result *lab.Result
	tested map[string]bool // steps
	cases  int
	owners int // cases with a session at two members
	lost   int // sessions ended although a process holding their state was alive
	resets int // sessions reset because all processes holding their state were dead
	wrong  int // streams with a wrong, missing or doubled byte
	hung   int // clients without answer or reset for long
}

func runCrash(ctx context.Context, e *lab.Env, r *lab.Result) error {
	var x, parked *crashes
	var leaked, also int
	err := r.WithStalls(func() (err error) {
		if x, leaked, err = crashWorld(e, r, "crash", false, func(x *crashes) error { return x.all(ctx) }); err != nil {
			return err
		}
		parked, also, err = crashWorld(e, r, "crash-parked", true, func(x *crashes) error { return x.parked(ctx) })
		return err
	})
	if err != nil {
		return err
	}
	x.add(parked)
	leaked += also
	bounds := explore.Quick
	if e.Size == lab.Full {
		bounds = explore.Thorough
	}
	e.Watch.Log("exploring the states of the model")
	model, err := explore.Run(ctx, bounds)
	if err != nil {
		return err
	}
	for _, v := range model.Violations {
		r.Note("model: %v", v)
	}
	steps := len(backend.Steps.Leaving) + len(backend.Steps.Arriving) + len(lb.Steps)
	for metric, n := range map[string]int{"protocol_steps": steps, "crash_steps_tested": len(x.tested), "crash_cases": x.cases, "crash_cases_parked": parked.cases, "two_owners": x.owners,
		"sessions_lost": x.lost, "sessions_reset_both_dead": x.resets, "streams_wrong": x.wrong, "clients_hung": x.hung, "leaked_flows": leaked,
		"model_states": model.States, "model_violations": len(model.Violations)} {
		r.Set(metric, float64(n))
	}
	for _, c := range []struct{ claim, metric, want string }{
		{"protocol steps with a killed process", "crash_steps_tested", fmt.Sprintf("== %d", steps)},
		{"sessions at two members", "two_owners", "== 0"},
		{"sessions ended although a process holding their state was alive", "sessions_lost", "== 0"},
		{"streams with a wrong, lost or doubled byte", "streams_wrong", "== 0"},
		{"clients with neither answers nor a reset", "clients_hung", "== 0"},
		{"leftover flows, sockets and entries", "leaked_flows", "== 0"},
		{"states of the model", "model_states", ">= 10000"},
		{"states with a violation", "model_violations", "== 0"},
	} {
		r.Claim(lab.Correctness, c.claim, c.metric, c.want)
	}
	return nil
}

// crashWorld runs all in a world of two servers, and returns the leftovers. With park, packets of a moving
// session wait at the source.
func crashWorld(e *lab.Env, r *lab.Result, name string, park bool, all func(*crashes) error) (x *crashes, leaked int, err error) {
	w, err := newWorld(e, name, 2)
	if err != nil {
		return nil, 0, err
	}
	w.stepped, w.hold, w.lapse, w.park = true, 500*time.Millisecond, time.Second, park
	w.servers[1].weight = 0 // every session begins at the first server
	if err := w.start(); err != nil {
		return nil, 0, err
	}
	defer w.stop()
	x = &crashes{world: w, result: r, tested: map[string]bool{}}
	if err := all(x); err != nil {
		return nil, 0, err
	}
	leaked, err = x.leaked()
	return x, leaked, err
}

// add adds the counts of another world.
func (x *crashes) add(o *crashes) {
	x.cases, x.owners, x.lost, x.resets, x.wrong, x.hung = x.cases+o.cases, x.owners+o.owners, x.lost+o.lost, x.resets+o.resets, x.wrong+o.wrong, x.hung+o.hung
}

// parked kills agents while packets wait at the source of a session: at each step of either server's agent
// and of the load balancer's agent.
func (x *crashes) parked(ctx context.Context) error {
	var all []victim
	for side, steps := range [][]string{backend.Steps.Leaving, backend.Steps.Arriving} {
		h := x.servers[side]
		for _, step := range steps {
			all = append(all, victim{step: step, what: "agent, packets parked", agent: func() *process { return h.agent }, again: h.stepAgent})
		}
	}
	for _, step := range lb.Steps {
		all = append(all, victim{step: step, what: "load balancer, packets parked", agent: func() *process { return x.lb }, again: x.startLB})
	}
	for _, v := range all {
		if x.env.Size == lab.Smoke && !slices.Contains([]string{"leaving: shut", "leaving: sent", "leaving: held", "arriving: built"}, v.step) {
			continue
		}
		if err := x.one(ctx, v); err != nil {
			return fmt.Errorf("killed at %v: %w", v, err)
		}
	}
	return nil
}

// all kills at every step. A victim is the load balancer's agent or a server's agent. The latter is killed
// for a moment or for long, alone, with the rest of its server, or with the other server's agent.
func (x *crashes) all(ctx context.Context) error {
	for side, steps := range [][]string{backend.Steps.Leaving, backend.Steps.Arriving} {
		for _, step := range steps {
			for _, v := range x.victims(side, step) {
				if err := x.one(ctx, v); err != nil {
					return fmt.Errorf("killed at %v: %w", v, err)
				}
			}
		}
	}
	for _, step := range lb.Steps {
		v := victim{step: step, what: "agent", agent: func() *process { return x.lb }, again: x.startLB}
		if err := x.one(ctx, v); err != nil {
			return fmt.Errorf("killed at %v: %w", v, err)
		}
	}
	return nil
}

// victim describes a kill: the victim and its circumstances.
type victim struct {
	step   string
	what   string
	agent  func() *process // the agent at this step
	with   []*process      // killed at the same moment
	away   time.Duration   // time until the restart
	whole  bool            // no process on its server survives
	before func() error    // further action before any restart
	again  func() error
}

func (v victim) String() string { return fmt.Sprintf("%q, %s", v.step, v.what) }

// away is longer than a keeper's grace, the time before others may take a dead member's sessions. It is
// also longer than the load balancer's wait for the two sides of a move (lapse).
const away = 1500 * time.Millisecond

// victims returns the victims at a step of a server's agent. The smallest run stops the agent for long at
// two steps of each side only: the socket is stopped then, or exists twice.
func (x *crashes) victims(side int, step string) []victim {
	h, other := x.servers[side], x.servers[1-side]
	short := victim{step: step, what: "agent", agent: func() *process { return h.agent }, again: h.stepAgent}
	long, both, whole := short, short, short
	long.what, long.away = "agent, for long", away
	both.what, both.away = "both servers' agents", away
	both.before = func() error { return other.agent.kill() }
	both.again = func() error {
		// The session is handled while the other server is unreachable.
		return errors.Join(h.stepAgent(), within(patience, "the end of the agent's transfers", func() (bool, error) {
			s, err := h.status()
			return err == nil && s.Sending == 0, err
		}), other.stepAgent())
	}
	whole.what, whole.whole, whole.with, whole.again = "whole server", true, []*process{h.keeper, h.member}, h.startAgain
	switch {
	case x.env.Size != lab.Smoke:
		return []victim{short, long, both, whole}
	case step == "leaving: dumped" || step == "leaving: done" || step == "arriving: kept" || step == "arriving: flipped":
		return []victim{short, long, both}
	}
	return []victim{short}
}

// one kills a victim at a step of a move from the first server to the second.
func (x *crashes) one(ctx context.Context, v victim) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	agent := v.agent()
	c, err := x.dial(x.env.Seed + uint64(x.cases))
	if err != nil {
		return err
	}
	c.pause = 2 * time.Millisecond
	if err := stream(ctx, c); err != nil {
		return err
	}
	defer func() { c.end(); c.Close() }()
	if err := x.speaks(c); err != nil {
		return err
	}
	order := "kill "
	for _, p := range v.with {
		order += fmt.Sprintf("%d ", p.PID)
	}
	if _, err := fmt.Fprintf(agent.in, "%sat %s\n", order, v.step); err != nil {
		return err
	}
	if _, err := agent.answer(patience); err != nil {
		return err
	}
	if err := x.moveUntil(agent, c); err != nil {
		return err
	}
	x.cases++
	x.tested[v.step] = true
	x.env.Watch.Log("killed at %v", v)
	for _, p := range v.with {
		<-p.Done()
	}
	if v.before != nil {
		if err := v.before(); err != nil {
			return err
		}
	}
	time.Sleep(max(v.away, 20*time.Millisecond))
	if err := v.again(); err != nil {
		return err
	}
	x.judge(c, v)
	return x.connected()
}

// moveUntil moves a session from the first server to the second, until the agent is dead.
func (x *crashes) moveUntil(agent *process, c *client) error {
	source := x.servers[0]
	for end := time.Now().Add(patience); ; {
		before := len(source.complaints())
		if _, err := fmt.Fprintf(source.member.in, "move %s @%s\n", c.remote, x.servers[1].name()); err != nil {
			return err
		}
		for again := false; !again; {
			select {
			case <-agent.Done():
				return nil
			case <-time.After(20 * time.Millisecond):
			}
			again = source.early(before)
			if time.Now().After(end) {
				return fmt.Errorf("step not reached: %q %s %s", source.complaints(), source.agent.errs, x.servers[1].agent.errs)
			}
		}
	}
}

// startAgain restarts a killed server.
func (h *host) startAgain() error {
	if err := h.startKeeper(); err != nil {
		return err
	}
	if err := h.stepAgent(); err != nil {
		return err
	}
	return h.startMember()
}

// speaks waits until a client hears more.
func (x *crashes) speaks(c *client) error {
	c.mu.Lock()
	before := c.heard
	c.mu.Unlock()
	return within(patience, "answers", func() (bool, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.err != nil {
			return true, nil
		}
		return c.heard > before+1000, nil
	})
}

// ends are the steps at which a session ends with its server. No other process holds its state yet, or none
// may resume it any more, because the client may have heard the new server.
var ends = map[string]bool{}

func init() {
	for i, step := range backend.Steps.Leaving {
		ends[step] = i <= slices.Index(backend.Steps.Leaving, "leaving: dumped")
	}
	for i, step := range backend.Steps.Arriving {
		ends[step] = i >= slices.Index(backend.Steps.Arriving, "arriving: flip")
	}
}

// judge counts the result of a session.
func (x *crashes) judge(c *client, v victim) {
	hung := x.speaks(c) != nil
	if n := x.owned(c); n > 1 {
		x.owners++
		x.result.Note("killed at %v: %d members hold the session", v, n)
	}
	s := c.finish()
	ended := s.reset || errors.Is(s.err, io.EOF)
	switch {
	case hung:
		x.hung++
		x.result.Note("killed at %v: the client hears nothing (%v)", v, s.err)
	case ended && v.whole && ends[v.step]:
		x.resets++
	case ended:
		x.lost++
		x.result.Note("killed at %v: the session was reset: %v; %s; %s", v, s.err, x.servers[0].agent.errs, x.servers[1].agent.errs)
	case s.err != nil || s.lost > 0 || s.duplicated > 0:
		x.wrong++
		x.result.Note("killed at %v: %+v", v, s)
	}
}

// owned returns the number of servers with a client's session at a member.
func (x *crashes) owned(c *client) (n int) {
	for _, h := range x.servers {
		r, err := handoff.Status(context.Background(), h.socket())
		if err != nil {
			continue
		}
		for _, s := range r.Services {
			for _, o := range s.Sessions {
				if o.Remote == c.remote && o.PID != 0 && !strings.HasPrefix(o.Member, "@") {
					n++
				}
			}
		}
	}
	return n
}

// leaked counts leftovers after all clients have ended: flows at the load balancer, entries of quarantines,
// sessions at keepers, sockets.
func (x *crashes) leaked() (n int, err error) {
	look := func() (int, error) {
		flows, err := x.flows()
		if err != nil {
			return 0, err
		}
		n := len(flows)
		for _, h := range x.servers {
			s, err := h.status()
			if err != nil {
				return 0, err
			}
			n += s.Sending + s.Receiving + s.Quarantined
			r, err := handoff.Status(context.Background(), h.socket())
			if err != nil {
				return 0, err
			}
			for _, v := range r.Services {
				for _, o := range v.Sessions {
					if o.Kind == "session" {
						n++
					}
				}
			}
			err = h.site.Do(func() error {
				all, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_TCP, LocalPort: serviceAt.Port(), States: 1<<sockdiag.Established | 1<<unix.BPF_TCP_CLOSE_WAIT})
				n += len(all)
				return err
			})
			if err != nil {
				return 0, err
			}
		}
		return n, nil
	}
	err = within(patience, "the end of all entries", func() (bool, error) {
		n, err = look()
		return err == nil && n == 0, err
	})
	if n > 0 {
		x.result.Note("left over: %d", n)
		return n, nil
	}
	return n, errors.Join(err)
}

// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/internal/guardstate"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Explainer = Feature{}

// Explain implements feature.Explainer. It returns the guard of a datagram and its verdict at this
// moment. The kernel runs the guard's program by BPF_PROG_TEST_RUN on a copy of its state, without
// charging anyone.
func (Feature) Explain(_ context.Context, r *kernel.Root, p feature.Packet) ([]feature.Verdict, error) {
	if p.Proto != "udp" {
		return nil, nil
	}
	all, unreadable, err := guards.All(r)
	if err != nil {
		return nil, err
	}
	var best *record
	bits := -1
	for _, g := range all {
		for _, e := range g.Spec.Service.udp() {
			if g.Meta.Inode == p.Inode && e.Port == p.To.Port() && e.Prefix.Contains(p.To.Addr()) && e.Prefix.Bits() > bits {
				best, bits = &g, e.Prefix.Bits()
			}
		}
	}
	sights := feature.UnreadSights(unreadable, p, feature.StageSocket)
	if best == nil {
		return sights, nil
	}
	service := best.Spec.Service
	s := feature.Verdict{Stage: feature.StageSocket, ExplainStep: feature.ExplainStep{Step: "guard of service " + service.Name}}
	if len(service.Interfaces) > 0 {
		s.Stage = feature.StageXDP
		if !slices.Contains(service.Interfaces, p.Interface) {
			s.Text = fmt.Sprintf("it works at %s, and the packet arrives at %s: it passes", service.location(), p.Interface)
			return append(sights, s), nil
		}
	}
	if err := decide(r, *best, p, &s); err != nil {
		return nil, fmt.Errorf("guard of service %s: %w", service.Name, err)
	}
	return append(sights, s), nil
}

// decide describes the guard's state and its decision at this moment.
func decide(r *kernel.Root, rec record, packet feature.Packet, s *feature.Verdict) error {
	p := rec.Spec
	o, err := r.Open(rec.Instance)
	if err != nil {
		return err
	}
	defer o.Close()
	state, err := readState(o.Maps[pinState])
	if err != nil {
		return err
	}
	if text := problem(r, rec, o.Maps[pinState], state); text != "" {
		s.Text, s.Warning = text, true
		return nil
	}
	chance, state, now, err := p.chance(o, packet)
	if err != nil {
		return err
	}
	s.Text = fmt.Sprintf("%s%s; at this moment a packet from %s ", p.Service.Options, fill(state, now), packet.From.Addr())
	s.Warning = chance < 1
	switch {
	case chance == 1 && state.Read(now).UnderAttack:
		s.Text += "passes, though others are refused"
	case chance == 1:
		s.Text += "passes"
	case p.Service.DryRun:
		s.Text += fmt.Sprintf("would be refused with a chance of %.0f %%, but passes in a dry run", 100-100*chance)
	case chance == 0:
		s.Text += "is refused: weir guard status shows the refused sources"
	default:
		s.Text += fmt.Sprintf("passes with a chance of %.0f %%: weir guard status shows the refused sources", 100*chance)
	}
	return nil
}

// fill describes the used part of the limit's burst; "" without a limit for all packets together.
func fill(s *guardstate.Layout, now uint64) string {
	l := s.Limits()
	if l.Interval == 0 {
		return ""
	}
	used := float64(0)
	if debt, at := s.Total.Debt, now<<guardstate.TickShift; debt > at {
		used = float64(debt-at) / float64(l.Depth)
	}
	return fmt.Sprintf(", %.0f %% of its burst used", 100*used)
}

// chance returns the probability of a copy of the guard passing a packet at this moment, 0 to 1.
// The guard shares capacity without a claim at random. It also returns the copied state and its
// time.
func (p published) chance(o *kernel.Opened, packet feature.Packet) (chance float64, state *guardstate.Layout, now uint64, err error) {
	hook := Cgroup
	if len(p.Service.Interfaces) > 0 {
		hook = XDP
	}
	frame, err := packet.Frame()
	if err != nil {
		return 0, nil, 0, err
	}
	sim, err := Simulate(hook, p.Service.limits(), packet.To, false)
	if err != nil {
		return 0, nil, 0, err
	}
	defer sim.Close()
	k := bpf.GuardGuardTargetKey{Address: packet.To.Addr().As16(), Port: guardstate.NetworkOrder(packet.To.Port())}
	var v bpf.GuardGuardTarget
	err = o.Maps[pinEach].Lookup(k, &v)
	known := err == nil
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, nil, 0, fmt.Errorf("read the destination's state: %w", err)
	}
	// Read the state after loading, because the burst refills during the load.
	now = kernel.Monotonic()
	if state, err = readState(o.Maps[pinState]); err != nil {
		return 0, nil, 0, err
	}
	limits := p.Service.limits()
	limits.Dry = false                 // report the decision without dry run
	const cases, caseEvery = 100, 9973 // ns: decisions vary with the time
	passed := 0
	for i := range cases {
		*sim.state.Layout = *state
		sim.setLimits(limits)
		if known {
			err = sim.each.Put(k, v)
		} else if err = sim.each.Delete(k); errors.Is(err, ebpf.ErrKeyNotExist) {
			err = nil
		}
		if err != nil {
			return 0, nil, 0, fmt.Errorf("copy the destination's state: %w", err)
		}
		passes, err := sim.Passes(now+uint64(i)*caseEvery, frame)
		if err != nil {
			return 0, nil, 0, err
		}
		if passes {
			passed++
		}
	}
	return float64(passed) / cases, state, now, nil
}

// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/weir-project/weir/lab/peers"
)

// returnLimit is the longest time from a collector's start to its sockets. nfacctd takes 6 s, and more if
// several start on two cores.
const returnLimit = 60 * time.Second

// patience is the longest time from SIGTERM to a collector's end; usually 2 to 5 s.
const patience = 10 * time.Second

// killAndReturn restarts collectors, some at a time, up to the plan's number of restarts. All devices send
// meanwhile.
func (s *stage) killAndReturn(ctx context.Context) error {
	for round := 1; s.restarted < s.kills.restarts; round++ {
		if round == 1 {
			s.say("now collectors are killed. Their routers are rejected (TCP reset, ICMP unreachable), not passed on: a collector with half of a router's streams cannot correlate them")
		}
		if err := s.round(ctx, s.victims(round)); err != nil {
			return err
		}
	}
	return s.askWhere(ctx) // the same devices come back: the answer must not have changed
}

// victim is a collector to kill, with the signal and the times.
type victim struct {
	*peers.Collector
	signal syscall.Signal
	delay  time.Duration // between the previous kill and this one
	down   time.Duration // from its end to its restart
}

// serving returns the collectors with a slot.
func (s *stage) serving() []*peers.Collector {
	if s.service == nil {
		return s.collectors
	}
	return s.service.Serving()
}

// victims draws the collectors to kill in a round. At least one stays alive. The first round takes as many
// as may be down together, to guarantee overlaps.
func (s *stage) victims(round int) []victim {
	n := min(s.kills.together, len(s.serving())-1, s.kills.restarts-s.restarted)
	if round > 1 && n > 1 {
		n = 1 + s.rand.IntN(n)
	}
	var all []victim
	for i, c := range s.rand.Perm(len(s.serving()))[:n] {
		v := victim{Collector: s.collectors[c], signal: syscall.SIGKILL}
		if (round+i)%3 == 0 {
			v.signal = syscall.SIGTERM
		}
		v.delay = time.Duration(s.rand.Int64N(int64(s.kills.apart)))
		v.down = s.kills.down/2 + time.Duration(s.rand.Int64N(int64(s.kills.down)))
		all = append(all, v)
	}
	return all
}

// round kills collectors and waits for their return.
//
// Earlier records of their devices must be counted first, because steering is not to blame for a record
// lost inside a killed collector. Then an epoch runs with these slots disturbed, and the others must count
// everything. It ends when the collectors are back and hold all sessions of their devices.
func (s *stage) round(ctx context.Context, victims []victim) error {
	slots := map[int]bool{}
	calm := s.ledger.undisturbed(len(s.collectors)) // of the epoch running during the preparations
	for _, v := range victims {
		slots[v.Number] = true
	}
	before := s.endEpoch(calm)
	for slot := range slots {
		s.ledger.disturb(slot)
	}
	if err := s.ledger.drain(ctx, before.epoch, slots, drainLimit); err != nil {
		return err
	}
	calm = s.ledger.undisturbed(len(s.collectors))
	if err := s.killAll(ctx, victims); err != nil {
		return err
	}
	if err := s.allUp(ctx, slots, returnLimit); err != nil {
		return err
	}
	if err := s.rejectsElsewhere(ctx, slots); err != nil {
		return err
	}
	during := s.endEpoch(calm)
	for slot := range slots {
		s.ledger.calm(slot)
	}
	s.say("back: the same routers are at %s again; %d records misdirected so far", names(victims), s.ledger.strays())
	return s.ledger.drain(ctx, during.epoch, during.calm, drainLimit)
}

// killAll kills the victims one after another and restarts each after its own delay.
func (s *stage) killAll(ctx context.Context, victims []victim) error {
	errs := make(chan error, len(victims))
	for _, v := range victims {
		if err := pause(ctx, v.delay); err != nil {
			return err
		}
		s.say("%s to collector %d: now only its routers are rejected", signalName(v.signal), v.Number)
		if err := v.Kill(v.signal); err != nil {
			return err
		}
		go func() { errs <- s.bringBack(ctx, v) }()
	}
	var failed error
	for range victims {
		if err := <-errs; err != nil && failed == nil {
			failed = err
		}
	}
	return failed
}

// bringBack restarts a killed collector after its end, like a service manager, and waits until its slot
// holds it.
func (s *stage) bringBack(ctx context.Context, v victim) error {
	select {
	case <-v.Done():
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(patience):
		s.say("collector %d did not end on %s: sending SIGKILL, like a service manager", v.Number, signalName(v.signal))
		if err := v.Kill(syscall.SIGKILL); err != nil {
			return err
		}
		<-v.Done()
	}
	if err := pause(ctx, v.down); err != nil {
		return err
	}
	s.say("collector %d starts again; its slot stays closed until its UDP and TCP sockets both exist", v.Number)
	if err := v.Start(); err != nil {
		return err
	}
	appeared, err := s.sockets.Appear(ctx, v.Collector, returnLimit)
	if err != nil && !v.Running() && ctx.Err() == nil {
		return nil // allUp restarts it
	}
	if err != nil {
		return err
	}
	if s.weir != nil {
		if err := s.awaitReadmission(ctx, v.Collector, appeared); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restarted++
	return nil
}

// pollInterval is short, because the error of a measured readmission must be small against its claim.
const pollInterval = 2 * time.Millisecond

func (s *stage) awaitReadmission(ctx context.Context, c *peers.Collector, appeared time.Time) error {
	for {
		pid, err := s.service.Occupant(c.Number)
		if err != nil {
			return err
		}
		if pid == c.PID() {
			took := time.Since(appeared)
			s.mu.Lock()
			s.readmits = append(s.readmits, took)
			s.admissions = append(s.admissions, admission{c.Number, c.Life(), s.fleet.Epoch(), time.Now()})
			s.mu.Unlock()
			s.say("collector %d was admitted %.1f ms after its last socket appeared", c.Number, ms(took))
			return nil
		}
		if !c.Running() {
			return nil // allUp restarts it
		}
		if time.Since(appeared) > returnLimit {
			return fmt.Errorf("slot %d of %s did not admit %s within %s of its last socket; see weir-serve.log", c.Number, s.name, c, returnLimit)
		}
		if err := pause(ctx, pollInterval); err != nil {
			return err
		}
	}
}

// lost returns the packets not delivered to each slot's member so far, both protocols together.
func (s *stage) lost(ctx context.Context) ([]uint64, error) {
	slots, err := s.service.Status(ctx)
	var n []uint64
	for _, v := range slots {
		n = append(n, v["udp"].Lost()+v["tcp"].Lost())
	}
	return n, err
}

// rejectsElsewhere adds weir's own rejections of live slots since the last call.
func (s *stage) rejectsElsewhere(ctx context.Context, dead map[int]bool) error {
	if s.weir == nil {
		return nil
	}
	now, err := s.lost(ctx)
	if err != nil {
		return err
	}
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	for slot, n := range now {
		if grown := int(n - s.lostBase[slot]); grown > 0 && !dead[slot] && !s.revived[slot] {
			s.ledger.rejected += grown
			s.result.Note("weir rejected %d packets of slot %d with a live collector", grown, slot)
		} else if grown > 0 {
			s.ledger.rejectedByWeir += grown
		}
	}
	s.lostBase, s.revived = now, nil
	return nil
}

func signalName(s syscall.Signal) string {
	if s == syscall.SIGKILL {
		return "SIGKILL"
	}
	return "SIGTERM"
}

func names(victims []victim) string {
	s := "collector"
	if len(victims) > 1 {
		s += "s"
	}
	for i, v := range victims {
		switch {
		case i == 0:
		case i == len(victims)-1:
			s += " and"
		default:
			s += ","
		}
		s += fmt.Sprintf(" %d", v.Number)
	}
	return s
}

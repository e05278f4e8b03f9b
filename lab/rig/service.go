// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab/peers"
)

// Service is a steered service and the collectors that serve it, one slot each.
type Service struct {
	Name       string
	Listen     []string // as weir.yaml has it
	Collectors []*peers.Collector

	weir  *Weir
	mu    sync.Mutex
	slots *steer.SlotReader // opened when first asked
}

// Where asks weir which slot each address belongs to.
func (s *Service) Where(ctx context.Context, addrs []netip.Addr) (map[netip.Addr]int, error) {
	args := []string{"steer", "where", "--json", "--service", s.Name}
	for _, a := range addrs {
		args = append(args, a.String())
	}
	out, err := s.weir.Run(ctx, args...)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Addresses []struct {
			Address netip.Addr `json:"address"`
			Slot    int        `json:"slot"`
		} `json:"addresses"`
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return nil, fmt.Errorf("weir steer where --json: %w: %.200s", err, out)
	}
	slots := map[netip.Addr]int{}
	for _, a := range answer.Addresses {
		slots[a.Address] = a.Slot
	}
	for _, a := range addrs {
		if _, ok := slots[a]; !ok {
			return nil, fmt.Errorf("weir steer where did not answer about %s", a)
		}
	}
	return slots, nil
}

// Verdicts are a slot's counters of one protocol, as weir steer status shows them.
type Verdicts struct {
	Steered, Rejected, Dropped, Passed, Diverted, Guests, Failed uint64
}

// Lost is what did not reach the slot's own member.
func (v Verdicts) Lost() uint64 { return v.Rejected + v.Dropped + v.Passed + v.Diverted + v.Failed }

// Status asks weir for the counters of every slot, by "udp" and "tcp".
func (s *Service) Status(ctx context.Context) ([]map[string]Verdicts, error) {
	out, err := s.weir.Run(ctx, "steer", "status", "--json", s.Name)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Services []struct {
			Slots []struct {
				Verdicts map[string]Verdicts `json:"verdicts"`
			} `json:"slots"`
		} `json:"services"`
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return nil, fmt.Errorf("weir steer status --json: %w: %.200s", err, out)
	}
	if len(answer.Services) != 1 || len(answer.Services[0].Slots) != len(s.Collectors) {
		return nil, fmt.Errorf("weir steer status --json %s: want one service of %d slots: %.200s", s.Name, len(s.Collectors), out)
	}
	var all []map[string]Verdicts
	for _, slot := range answer.Services[0].Slots {
		all = append(all, slot.Verdicts)
	}
	return all, nil
}

// errClosed ends whoever looks for slots while the run ends.
var errClosed = errors.New("the run is over")

// Holder returns the process that holds a slot, 0 for an empty one. It reads the pins without starting a
// process, so that it can be asked every few milliseconds.
func (s *Service) Holder(slot int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slots == nil {
		if s.weir == nil {
			return 0, errClosed
		}
		var err error
		if s.slots, err = steer.OpenSlots(kernel.OpenRoot(s.weir.env.Root), "", s.Name); err != nil {
			return 0, err
		}
		s.weir.env.OnClose(s.close)
	}
	pid, admitted, err := s.slots.Admitted(slot)
	if !admitted {
		pid = 0
	}
	return pid, err
}

func (s *Service) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slots != nil {
		s.slots.Close()
		s.slots, s.weir = nil, nil
	}
}

// Admitted waits until every slot has its collector.
func (s *Service) Admitted(ctx context.Context, limit time.Duration) error {
	for deadline := time.Now().Add(limit); ; {
		missing := 0
		for i, c := range s.Collectors {
			pid, err := s.Holder(i)
			if err != nil {
				return err
			}
			if !c.Running() {
				return fmt.Errorf("%s has ended: %w; see its log in %s", c, c.Err(), c.Dir())
			}
			if pid != c.PID() {
				missing++
			}
		}
		if missing == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			status, _ := s.weir.Run(ctx, "steer", "status")
			return fmt.Errorf("%d of %d slots are still empty after %s:\n%s", missing, len(s.Collectors), limit, status)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

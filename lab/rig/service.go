// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab/peers"
)

// Service is a steered service with its collectors, one slot each.
type Service struct {
	Name       string
	Listen     []string // as in weir.yaml
	Engine     string   // as in weir.yaml; "" leaves the choice to weir
	Collectors []*peers.Collector
	Exact      bool // collectors receive only sent messages: weir replays no templates

	weir   *Weir
	spare  int // number of collectors at the end without a slot
	mu     sync.Mutex
	slots  *slots.Reader // opened at the first use
	closed bool
}

// Spare takes the last n collectors out of the configuration; n = 0 restores all. The next Apply applies
// it.
func (s *Service) Spare(n int) {
	if s.weir != nil {
		s.weir.mu.Lock()
		defer s.weir.mu.Unlock()
	}
	s.spare = n
}

// Serving returns the collectors with a slot: slot n belongs to collector n.
func (s *Service) Serving() []*peers.Collector { return s.Collectors[:len(s.Collectors)-s.spare] }

// Where asks weir for the slot of each address.
func (s *Service) Where(ctx context.Context, addrs []netip.Addr) (map[netip.Addr]int, error) {
	places, err := s.locate(ctx, addrs)
	slots := map[netip.Addr]int{}
	for _, p := range places {
		slots[p.Address] = p.Slot
	}
	return slots, err
}

// Table asks weir for the slot of every bucket.
func (s *Service) Table(ctx context.Context) ([]int, error) {
	places, err := s.locate(ctx, oneOfEachBucket(uint32(s.weir.env.Seed)))
	if err != nil {
		return nil, err
	}
	table := make([]int, spec.Buckets)
	seen := map[int]bool{}
	for _, p := range places {
		if p.Bucket < 0 || p.Bucket >= len(table) {
			return nil, fmt.Errorf("weir steer where: %s is in bucket %d of %d", p.Address, p.Bucket, len(table))
		}
		table[p.Bucket], seen[p.Bucket] = p.Slot, true
	}
	if len(seen) != len(table) {
		return nil, fmt.Errorf("weir steer where named %d of %d buckets: weir and the lab use different hashes", len(seen), len(table))
	}
	return table, nil
}

// oneOfEachBucket returns one address of each bucket.
func oneOfEachBucket(seed uint32) []netip.Addr {
	found := map[int]netip.Addr{}
	for a := netip.MustParseAddr("10.0.0.1"); len(found) < spec.Buckets; a = a.Next() {
		found[spec.Bucket(seed, a)] = a
	}
	return slices.Collect(maps.Values(found))
}

// location is weir's answer for an address.
type location struct {
	Address netip.Addr `json:"address"`
	Bucket  int        `json:"bucket"`
	Slot    int        `json:"slot"`
}

// locate asks weir for the location of each address.
func (s *Service) locate(ctx context.Context, addrs []netip.Addr) ([]location, error) {
	args := []string{"steer", "where", "--json", "--service", s.Name}
	for _, a := range addrs {
		args = append(args, a.String())
	}
	out, err := s.weir.Run(ctx, args...)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Addresses []location `json:"addresses"`
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return nil, fmt.Errorf("weir steer where --json: %w: %.200s", err, out)
	}
	answered := map[netip.Addr]bool{}
	for _, p := range answer.Addresses {
		answered[p.Address] = true
	}
	for _, a := range addrs {
		if !answered[a] {
			return nil, fmt.Errorf("weir steer where gave no answer for %s", a)
		}
	}
	return answer.Addresses, nil
}

// Verdicts are a slot's counters of one protocol, as shown by weir steer status.
type Verdicts struct {
	Steered, Rejected, Dropped, Passed, Diverted, Guests, Failed uint64
}

// Lost counts packets not delivered to the slot's own member.
func (v Verdicts) Lost() uint64 { return v.Rejected + v.Dropped + v.Passed + v.Diverted + v.Failed }

// status is weir's status of a service.
type status struct {
	Engine string `json:"engine"`
	Slots  []struct {
		Verdicts map[string]Verdicts `json:"verdicts"`
	} `json:"slots"`
}

func (s *Service) status(ctx context.Context) (status, error) {
	out, err := s.weir.Run(ctx, "steer", "status", "--json", s.Name)
	if err != nil {
		return status{}, err
	}
	var answer struct {
		Services []status `json:"services"`
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return status{}, fmt.Errorf("weir steer status --json: %w: %.200s", err, out)
	}
	if len(answer.Services) != 1 || len(answer.Services[0].Slots) != len(s.Serving()) {
		return status{}, fmt.Errorf("weir steer status --json %s: want one service of %d slots: %.200s", s.Name, len(s.Serving()), out)
	}
	return answer.Services[0], nil
}

// Status asks weir for the counters of every slot, by "udp" and "tcp".
func (s *Service) Status(ctx context.Context) ([]map[string]Verdicts, error) {
	st, err := s.status(ctx)
	var all []map[string]Verdicts
	for _, slot := range st.Slots {
		all = append(all, slot.Verdicts)
	}
	return all, err
}

// Exporters asks weir for the exporters with known templates.
func (s *Service) Exporters(ctx context.Context) (map[netip.Addr]bool, error) {
	out, err := s.weir.Run(ctx, "steer", "templates", "--json", s.Name)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Exporters []struct {
			Address   netip.AddrPort    `json:"address"`
			Templates []json.RawMessage `json:"templates"`
		} `json:"exporters"`
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return nil, fmt.Errorf("weir steer templates --json: %w: %.200s", err, out)
	}
	known := map[netip.Addr]bool{}
	for _, e := range answer.Exporters {
		known[e.Address.Addr().Unmap()] = len(e.Templates) > 0
	}
	return known, nil
}

// Steered asks weir for the engine of the service.
func (s *Service) Steered(ctx context.Context) (engine string, err error) {
	st, err := s.status(ctx)
	return st.Engine, err
}

// errClosed ends searches for slots when the run ends.
var errClosed = errors.New("the run is over")

// Occupant returns the process in a slot, 0 for an empty slot. It reads the pins without starting a
// process, so callers can poll it every few milliseconds.
func (s *Service) Occupant(slot int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, errClosed
	}
	if s.slots == nil {
		var err error
		if s.slots, err = slots.Open(kernel.OpenRoot(s.weir.env.Root), "", s.Name); err != nil {
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

// Reopen closes the pins opened by Occupant. The next call reads the current shape of the service.
func (s *Service) Reopen() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slots != nil {
		s.slots.Close()
		s.slots = nil
	}
}

func (s *Service) close() {
	s.Reopen()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

// Admitted waits until every slot holds its collector.
func (s *Service) Admitted(ctx context.Context, limit time.Duration) error {
	for deadline := time.Now().Add(limit); ; {
		missing := 0
		for i, c := range s.Serving() {
			pid, err := s.Occupant(i)
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
			return fmt.Errorf("%d of %d slots are still empty after %s:\n%s", missing, len(s.Serving()), limit, status)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

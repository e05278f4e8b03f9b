// SPDX-License-Identifier: Apache-2.0

// Package sources bounds the sources that a load balancer's data path makes known.
//
// Anybody can make up sources, so they become known until three quarters of the table of flows are taken. The data path counts the flows
// that it learns. It does not see flows go, so it never knows how many there are: the agent counts the table once a second, and
// says at how many learned flows the room for sources ends. The data path stops there, in the midst of a burst, and without an agent.
// Flows that are learned while the agent counts may count twice, until the next count. The agent's own entries count from then on.
package sources

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// The entries of lb_sources, see lb.h.
const (
	learnedAt = iota
	untilAt
)

// Learned is how many flows the data path has learned, ever.
func Learned(m *ebpf.Map) (n uint64, err error) {
	if err := m.Lookup(uint32(learnedAt), &n); err != nil {
		return 0, fmt.Errorf("reading how many flows were learned: %w", err)
	}
	return n, nil
}

// Made reports whether an agent has said where the room ends: not of a new table, nor of an older weir's.
func Made(m *ebpf.Map) (bool, error) {
	var until uint64
	if err := m.Lookup(uint32(untilAt), &until); err != nil {
		return false, fmt.Errorf("reading the room for sources: %w", err)
	}
	return until != 0, nil
}

// Make says where the room ends in a table of this size, in which known flows were counted when the data path had learned so many, or
// later. It reports whether sources have no room.
func Make(m *ebpf.Map, learned uint64, known, size int) (full bool, err error) {
	most := size * 3 / 4
	until := learned + uint64(max(0, most-known))
	if err := m.Put(uint32(untilAt), max(1, until)); err != nil {
		return false, fmt.Errorf("making room for sources: %w", err)
	}
	return known > most, nil
}

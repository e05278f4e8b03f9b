// SPDX-License-Identifier: Apache-2.0

// Package sources limits the sources learned by a load balancer's data path.
//
// Anybody can forge sources, so they are learned up to three quarters of the table of flows. The
// data path counts learned flows, but not removed ones, so it does not know the number of flows.
// Once a second the agent counts the table. It sets the count of learned flows at which the room
// for sources ends. The data path stops there, even in a burst or without an agent. Flows learned
// during the agent's count may count twice until the next count. The agent's own entries count from
// the next count on.
package sources

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// These are the entries of lb_sources: see lb.h.
const (
	learnedAt = iota
	untilAt
)

// Learned returns the number of flows learned since the data path was created.
func Learned(m *ebpf.Map) (n uint64, err error) {
	if err := m.Lookup(uint32(learnedAt), &n); err != nil {
		return 0, fmt.Errorf("read the number of learned flows: %w", err)
	}
	return n, nil
}

// Made reports whether an agent has set the room for sources. It is false for a new table, and with
// an agent of an older version.
func Made(m *ebpf.Map) (bool, error) {
	var until uint64
	if err := m.Lookup(uint32(untilAt), &until); err != nil {
		return false, fmt.Errorf("read the room for sources: %w", err)
	}
	return until != 0, nil
}

// Make sets the room for sources in a table of this size. known is a count of the table, begun when
// the data path had learned the given number of flows. Make reports whether there is no room.
func Make(m *ebpf.Map, learned uint64, known, size int) (full bool, err error) {
	most := size * 3 / 4
	until := learned + uint64(max(0, most-known))
	if err := m.Put(uint32(untilAt), max(1, until)); err != nil {
		return false, fmt.Errorf("set the room for sources: %w", err)
	}
	return known > most, nil
}

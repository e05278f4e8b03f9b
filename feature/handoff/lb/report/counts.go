// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/kernel"
)

// ReadCounts reads the map lb_counts.
func ReadCounts(m *ebpf.Map) (c Counts, err error) {
	for i, n := range []*uint64{&c.In, &c.Out, &c.Learned, &c.Buffered, &c.Mute, &c.NoReset, &c.NoBackend, &c.Full, &c.ICMP, &c.UnknownSource,
		&c.Fragment, &c.Big, &c.Late, &c.Awaited} {
		var each []uint64
		if err := m.Lookup(uint32(i), &each); err != nil {
			return c, fmt.Errorf("read counts: %w", err)
		}
		for _, v := range each {
			*n += v
		}
	}
	return c, nil
}

// usersFor is how long packets from unprivileged source ports are reported.
const usersFor = 10 * time.Minute

// UsersSend reports whether recent packets of a backend's tunnel came from source ports open to
// every user. m is the map lb_users.
func UsersSend(m *ebpf.Map, b move.Backend) bool {
	var seen uint64
	err := m.Lookup(uint32(b), &seen)
	now := kernel.Monotonic()
	return err == nil && seen > 0 && time.Duration(now-min(now, seen)) < usersFor
}

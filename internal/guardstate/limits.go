// SPDX-License-Identifier: Apache-2.0

package guardstate

// Limits are what a guard enforces; they change while it runs.
type Limits struct {
	Total Limit // of all packets; 0: none
	Each  Limit // of each destination address and port; 0: none
	Dry   bool  // decide and count, and pass everything
}

const (
	ticksPerSecond = 1e9 * 1 << TickShift
	TickShift      = 4  // ticks in a nanosecond: 1 << 4; guard.h: GUARD_TICK_SHIFT
	epochShift     = 31 // GUARD_EPOCH_SHIFT, of ns

	// MinDepth is how far ahead of its limit a guard may let packets run, in ns, unless eight packets take longer.
	// In any second at most limit × (1 + 0.12) + 1 pass, or limit + 8 where the limit is below 67; and 127 more where
	// sockets get merged datagrams, of which the last packet may be 128.
	MinDepth = 120_000_000
	// insertInterval bounds how many sources that were never seen are remembered, in ns a source: 32,768 a second
	// fill the table of 65,536 in two seconds of a spoofed flood, and those seen twice stay.
	insertInterval = 30_517
)

// Layout is what the programs read.
func (l Limits) Layout() LimitsLayout {
	out := LimitsLayout{InsertInterval: insertInterval << TickShift}
	if l.Dry {
		out.Dry = 1
	}
	out.Interval, out.Depth = pace(l.Total)
	out.TargetInterval, out.TargetDepth = pace(l.Each)
	share := l.Total
	if share == 0 {
		share = l.Each
	}
	out.PerEpoch = uint32(min(uint64(share)<<epochShift/1e9, 1<<31))
	out.Pattern = uint32(min(uint64(share)/8<<8, 1<<27)) // packets/s, GUARD_RATE fraction bits; programs shift it by 4
	return out
}

// pace is a limit's interval and depth in ticks.
func pace(l Limit) (interval, depth uint64) {
	if l == 0 {
		return 0, 0
	}
	interval = max(uint64(ticksPerSecond)/uint64(l), 1)
	return interval, max(MinDepth<<TickShift, 8*interval)
}

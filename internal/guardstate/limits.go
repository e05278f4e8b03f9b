// SPDX-License-Identifier: Apache-2.0

package guardstate

// Limits are the settings of a guard. They can change at run time.
type Limits struct {
	Total Limit // of all packets; 0: none
	Each  Limit // of each destination address and port; 0: none
	Dry   bool  // decide and count, but pass everything
}

const (
	ticksPerSecond = 1e9 * 1 << TickShift
	TickShift      = 4  // ticks per nanosecond: 1 << 4; guard.h: GUARD_TICK_SHIFT
	epochShift     = 31 // GUARD_EPOCH_SHIFT, of ns

	// MinDepth is the permitted burst above the limit, in ns, unless eight packets take longer. In
	// any second at most limit × (1 + 0.12) + 1 packets pass, or limit + 8 for limits below 67.
	// Sockets with merged datagrams may get 127 more, because the last one may hold 128 packets.
	MinDepth = 120_000_000
	// insertInterval limits the rate of remembering new sources, in ns per source. 32,768 a second
	// fill the table of 65,536 in two seconds of a spoofed flood. Sources seen twice stay.
	insertInterval = 30_517
)

// Layout returns the limits in the layout of the programs.
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
	out.Pattern = uint32(min(uint64(share)/8<<8, 1<<27)) // packets/s with GUARD_RATE fraction bits; programs shift it by 4
	return out
}

// pace returns a limit's interval and depth in ticks.
func pace(l Limit) (interval, depth uint64) {
	if l == 0 {
		return 0, 0
	}
	interval = max(uint64(ticksPerSecond)/uint64(l), 1)
	return interval, max(MinDepth<<TickShift, 8*interval)
}

// SPDX-License-Identifier: Apache-2.0

package expr

// A rate is a bucket of Limit packets for each key, which fills evenly in Per nanoseconds: what finds it empty is above the
// rate. It is kept as one number, the time at which the bucket will be full again (the generic cell rate algorithm, ITU-T
// I.371): compiled programs do this very arithmetic.

// Interval is the time between packets at the limit, in whole nanoseconds.
func (r *Rate) Interval() uint64 { return max(r.Per/r.Limit, 1) }

// Tolerance is how far ahead the time of the full bucket may be for a packet to find something in it.
func (r *Rate) Tolerance() uint64 { return r.Interval() * (r.Limit - 1) }

// next takes a packet at now from a bucket that will be full at full. It returns when the bucket will be full then, and
// whether the packet is above the rate, which takes nothing.
func (r *Rate) next(full, now uint64) (uint64, bool) {
	start := max(full, now)
	if start-now > r.Tolerance() {
		return full, true
	}
	return start + r.Interval(), false
}

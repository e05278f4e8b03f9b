// SPDX-License-Identifier: Apache-2.0

package expr

// A rate is a bucket of Limit packets for each key. It fills evenly in Per nanoseconds. A packet at
// an empty bucket is above the rate. The state is one number, the time of the full bucket (generic
// cell rate algorithm, ITU-T I.371). Compiled programs use the same arithmetic.

// Interval returns the time between packets at the limit, in whole nanoseconds.
func (r *Rate) Interval() uint64 { return max(r.Per/r.Limit, 1) }

// Tolerance returns the maximum distance to the time of the full bucket, for a bucket still holding
// a packet.
func (r *Rate) Tolerance() uint64 { return r.Interval() * (r.Limit - 1) }

// next takes a packet at time now from a bucket full at time full. It returns the bucket's next
// full time, and whether the packet is above the rate. A packet above the rate takes nothing.
func (r *Rate) next(full, now uint64) (uint64, bool) {
	start := max(full, now)
	if start-now > r.Tolerance() {
		return full, true
	}
	return start + r.Interval(), false
}

// SPDX-License-Identifier: Apache-2.0

package live

import (
	"math"
	"time"
)

// FalseAlarms is how often, per second on average, a session takes a link that works for dead, when each way of it loses packets
// independently with probability loss: as often as multiplier answers in a row are missing. What is lost together (a burst longer
// than multiplier intervals) is an outage, and no false alarm.
func FalseAlarms(loss float64, interval time.Duration, multiplier int) float64 {
	missing := 1 - (1-loss)*(1-loss)
	return math.Pow(missing, float64(multiplier)) * (1 - missing) / interval.Seconds()
}

// SPDX-License-Identifier: Apache-2.0

package accept

import "time"

// A connection costs the process some 50 µs from accept to its first message. A single local user
// connecting and closing without pause takes a whole CPU and keeps the listen queue full for all
// others. So each user has a budget of connections. Connections beyond it are closed right after
// accept. The queue can still be full for a moment, and clients retry (package redial).
const (
	connectRate  = 1000 // connections per second and user, in the long run
	connectBurst = 1000
	maxChurners  = 4096 // maximum number of remembered users
)

// churn is the recent connections of a user.
type churn struct {
	used float64 // connections, minus connectRate per second since at
	at   time.Time
	told bool
}

func (c churn) remaining(now time.Time) float64 {
	return max(0, c.used-connectRate*now.Sub(c.at).Seconds())
}

// churns counts a connection of a user to a Unix socket. It reports whether the user's budget is
// exhausted. Only Next calls it.
func (l *Listener) churns(p Peer, now time.Time) bool {
	if p.kind != unixUser || p.trusted() {
		return false
	}
	c := l.churners[p]
	used := c.remaining(now)
	if used+1 > connectBurst {
		if !c.told {
			c.told = true
			l.churners[p] = c
			l.o.Log.Warn("connections refused, user connects too often", "listener", l.o.Name, "peer", p, "rate", connectRate)
		}
		return true
	}
	if l.churners == nil {
		l.churners = map[Peer]churn{}
	}
	if len(l.churners) >= maxChurners {
		for q, x := range l.churners {
			if x.remaining(now) == 0 {
				delete(l.churners, q)
			}
		}
	}
	if len(l.churners) < maxChurners || c.used > 0 {
		l.churners[p] = churn{used + 1, now, c.told && used > connectBurst/2}
	}
	return false
}

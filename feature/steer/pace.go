// SPDX-License-Identifier: Apache-2.0

package steer

import "time"

// Any user can open sockets at a watched port, also in a network namespace of the user's own. Each socket triggers a look at
// once, so looks have a budget of time.
const (
	lookShare = 10                     // a tenth of a CPU
	lookBurst = 500 * time.Millisecond // that many looks are not held up: daemons start together
)

// pace bounds the time that looks take.
type pace struct {
	spent time.Duration // beyond the budget if more than lookBurst
	at    time.Time
}

// took notes that a look has ended, and how long it was.
func (p *pace) took(d time.Duration, now time.Time) {
	p.fill(now)
	p.spent += d
}

// wait is how long the next look is to be held up.
func (p *pace) wait(now time.Time) time.Duration {
	p.fill(now)
	return max(0, lookShare*(p.spent-lookBurst))
}

func (p *pace) fill(now time.Time) {
	p.spent = max(0, p.spent-now.Sub(p.at)/lookShare)
	p.at = now
}

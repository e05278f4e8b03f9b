// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"sync/atomic"
	"testing"
	"time"
)

// The tick is short enough for packets to leave within their interval, or within 90 % of it with a multiplier of 1,
// and never before 75 % (RFC 5880 section 6.8.7).
func TestTick(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		interval, echo time.Duration
		multiplier     int
		want           time.Duration
	}{
		{50 * ms, 0, 3, 2500 * time.Microsecond},
		{8 * ms, 0, 3, 2 * ms},
		{8 * ms, 0, 1, ms},
		{50 * ms, 8 * ms, 3, 2 * ms},
		{ms, 0, 1, ms / 4}, // the shortest tick
	} {
		x := Config{Sessions: []Session{{Interval: c.interval, Echo: c.echo, Multiplier: c.multiplier}}}
		if got := x.Tick(); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

type ticks chan time.Duration

func (t ticks) SetTick(d time.Duration) { t <- d }

// keepTick follows the current configuration.
func TestKeepTick(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	said := make(ticks)
	r := runner{config: &atomic.Pointer[Config]{}}
	r.config.Store(&Config{Sessions: []Session{{Interval: 4 * time.Millisecond, Multiplier: 3}}})
	go keepTick(ctx, said, r.config)
	for _, want := range []time.Duration{time.Millisecond, 2 * time.Millisecond} {
		select {
		case got := <-said:
			if got != want {
				t.Errorf("%v, want %v", got, want)
			}
		case <-ctx.Done():
			t.Fatal("nothing is said")
		}
		r.know(Config{Sessions: []Session{{Interval: 8 * time.Millisecond, Multiplier: 3}}})
	}
}

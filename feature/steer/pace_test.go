// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"testing"
	"time"
)

// TestPace: endless events get a tenth of a CPU, and few events are not delayed.
func TestPace(t *testing.T) {
	var p pace
	now := time.Now()
	const look = 20 * time.Millisecond
	for i := range int(lookBurst / look) {
		if d := p.wait(now); d != 0 {
			t.Fatalf("look %d is held up by %s", i, d)
		}
		now = now.Add(look)
		p.spend(look, now)
	}
	began, spent := now, time.Duration(0)
	for now.Sub(began) < time.Minute {
		now = now.Add(p.wait(now) + look)
		p.spend(look, now)
		spent += look
	}
	if share := spent.Seconds() / now.Sub(began).Seconds(); share > 0.12 {
		t.Errorf("looks take %.2f of a CPU", share)
	}
	now = now.Add(lookShare * lookBurst * 2)
	if d := p.wait(now); d != 0 {
		t.Errorf("after a quiet time a look is held up by %s", d)
	}
}

// TestEventPace: a flood of events is read at a limited rate, and the first events at once.
func TestEventPace(t *testing.T) {
	var p eventPace
	now, began := time.Now(), time.Now()
	for i := range 100_000 {
		rest := p.next(now)
		if i < eventBurst-1 && rest > 0 {
			t.Fatalf("event %d waits for %v", i, rest)
		}
		now = now.Add(rest + 5*time.Microsecond)
	}
	if rate := 100_000 / now.Sub(began).Seconds(); rate > 1.05*eventBurst/eventRest.Seconds() {
		t.Errorf("%.0f a second", rate)
	}
	for range 10 * eventBurst {
		if rest := p.next(now); rest > 0 {
			t.Fatalf("seldom events wait for %v", rest)
		}
		now = now.Add(time.Millisecond)
	}
}

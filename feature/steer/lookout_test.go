// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/service"
)

// TestLookouts: searches for a missing member become rarer until a socket opens at its ports, its service changes, or
// the reason changes.
func TestLookouts(t *testing.T) {
	s := &state.Service{Record: &record.Service{Service: spec.Service{}}, Endpoints: []service.Endpoint{{Port: 9991}}}
	slot, why := slots.Slot{Service: "svc"}, errors.New("not running")
	var o lookouts
	now := time.Now()
	// looks counts the searches in the given number of seconds.
	looks := func(seconds int, why error) (n int) {
		for range seconds {
			now = now.Add(lookEvery)
			if o.due(s, slot, now) {
				n++
				o.missed(s, slot, why, now)
			}
		}
		return n
	}
	if n := looks(lookOften, why); n != lookOften {
		t.Errorf("looked %d times in the first %d s", n, lookOften)
	}
	if n := looks(320, why); n < 320/lookAtMost-2 || n > 320/lookAtMost+4 {
		t.Errorf("looked %d times in 320 s, want about 320/%d", n, lookAtMost)
	}
	again := func(what string) {
		t.Helper()
		if n := looks(lookOften, why); n != lookOften {
			t.Errorf("%s: looked %d times in %d s", what, n, lookOften)
		}
		looks(320, why)
	}
	o.opened(9992)
	if o.due(s, slot, now) {
		t.Error("due by another port")
	}
	o.opened(9991)
	if !o.due(s, slot, now) {
		t.Error("not due by its port")
	}
	o.quiet()
	again("after a socket opened")
	s.Record = &record.Service{}
	again("with another configuration")
	looks(lookAtMost, errors.New("socket missing"))
	if n := looks(lookOften, errors.New("socket missing")); n < lookOften-1 {
		t.Errorf("with another reason: looked %d times", n)
	}
	o.keep(map[slots.Slot]bool{})
	again("after it was filled")
}

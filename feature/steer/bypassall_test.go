// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"slices"
	"testing"

	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// TestBypassAll bypasses all services of both engines and steers them again, from the pins alone. apply keeps the
// bypass.
func TestBypassAll(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1, Engine: spec.EngineSkLookup}, "udp 127.0.0.1:9991")
	a := startSink(t, "udp4=127.0.0.1:9991")
	other := w.cfg.Services[0]
	other.Name, other.Listen, other.Engine = "other", []service.Listen{mustListen(t, "udp 127.0.0.1:9992")}, spec.EngineReuseport
	w.cfg.Services = append(w.cfg.Services, other) // without members it rejects
	w.apply()
	answers := func(want string) {
		t.Helper()
		if got := ask(t, "udp", sources(1)[0], loopback4); got != want {
			t.Errorf("answered by %s, want %s", got, want)
		}
	}
	answers(refused)
	for _, on := range []bool{true, true, false} {
		var did []string
		w.locked(func(l *kernel.WriteLock) (err error) { did, err = BypassAll(t.Context(), l, on); return err })
		was := w.state().Bypassed
		if was != on || len(did) > 0 && !slices.Equal(did, []string{"other", "svc"}) {
			t.Errorf("bypassed %t: changed %q, and svc is %t", on, did, was)
		}
		if again := w.apply(); len(again) != 0 {
			t.Errorf("applied again, it would %v", again)
		}
		if on {
			answers(fmt.Sprint(a.pid()))
		} else {
			answers(refused)
		}
	}
}

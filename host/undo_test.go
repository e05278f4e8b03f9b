// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// everyFeatureChanged is everyFeature after a change: of each feature an instance is added, changed and removed.
const everyFeatureChanged = `
services:
  telemetry:
    listen: [udp 0.0.0.0:4739]
    steer: {slots: 3, share_port: true, generations: {}}
    members: [{slot: 0, pid: %[1]d}]
    guard: {limit: 1kpps}
  syslog: {listen: [udp 0.0.0.0:514], guard: {limit: 5kpps}}
filter:
  - {name: tcx, hook: tcx, interfaces: [lo], rules: [{match: 'udp.dstport == 10', action: drop}]}
  - {name: comes, hook: tcx, interfaces: [lo], rules: [{match: 'udp.dstport == 9', action: drop}]}
handoff: {keeper: {hold: 900ms, grace: 100ms}}
reroute:
  - {name: core, interface: d0, bfd: {peer: "fd00:12::2", interval: 60ms, multiplier: 3}, repairs: [{segments: ["fc00:3::f"], interface: d1, via: "fd00:13::3"}]}
`

// An apply interrupted at any step leaves every feature unchanged.
func TestFailedApplyLeavesEveryFeature(t *testing.T) {
	w, before, pid := damagedWorld(t)
	after := w.config(everyFeatureChanged, pid)
	after.AllowOutage = true
	planned := errors.New("planned failure")
	defer kerneltest.OnStep(nil)
	defer kerneltest.OnTry(nil)
	every := nstest.Stride(80)
	for _, how := range []string{"interrupted", "failed"} {
		was := w.saved()
		for n := rand.IntN(every); ; n += every {
			ctx, cancel := context.WithCancel(t.Context())
			i, at := 0, ""
			here := func(step string) bool {
				i++
				if i == n+1 {
					at = step
				}
				return i == n+1
			}
			if how == "failed" {
				kerneltest.OnTry(func(step string) error {
					if here(step) {
						return planned
					}
					return nil
				})
			} else {
				kerneltest.OnStep(func(step string) {
					if here(step) {
						cancel()
					}
				})
			}
			err := w.Apply(ctx, after, func(Done) {})
			kerneltest.OnStep(nil)
			kerneltest.OnTry(nil)
			cancel()
			if at == "" || err == nil {
				if n < 20 {
					t.Errorf("%s: there were %d steps", how, n)
				}
				break
			}
			if !errors.Is(err, context.Canceled) && !errors.Is(err, planned) {
				t.Fatalf("%s at step %d (%s): %v", how, n, at, err)
			}
			if now := w.saved(); now != was {
				t.Fatalf("%s at step %d (%s): the state is not what it was:\n%s", how, n, at, diff(was, now))
			}
			if steps := w.plan(before); len(steps) > 0 {
				t.Errorf("%s at step %d (%s): what there was is not in force: %q", how, n, at, steps)
			}
		}
		w.apply(before)
	}
}

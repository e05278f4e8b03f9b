// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
	"github.com/weir-project/weir/kernel/probe"
)

// needExitHook skips the test on kernels without the exit hook: a declared, optional need.
func needExitHook(t testing.TB) {
	if err := probe.ExitTracepoint.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
}

// runChange applies a configuration and exits at the given step.
func runChange(args []string) error {
	var cfg spec.Config
	data, err := os.ReadFile(args[2])
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, &cfg); err != nil {
		return err
	}
	kerneltest.DieAt(args[1])
	_, err = featuretest.Apply(context.Background(), kernel.OpenRoot(args[0]), Feature{}, cfg)
	return err
}

// killedApply applies the world's configuration in a process killed at the given step. It reports whether the process
// finished first.
func (w *world) killedApply(steps int) bool {
	w.t.Helper()
	return w.killedApplyAt(steps) == ""
}

// killedApplyAt is killedApply, but returns the name of the step, or "" if the process finished first.
func (w *world) killedApplyAt(steps int) string {
	w.t.Helper()
	if errs := w.cfg.Validate(); len(errs) > 0 {
		w.t.Fatal(errs)
	}
	data, err := json.Marshal(w.cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	file := w.t.TempDir() + "/config.json"
	if err := os.WriteFile(file, data, 0o600); err != nil {
		w.t.Fatal(err)
	}
	return kerneltest.Killed(w.t, nstest.Child("change", w.root.Path(), steps, file))
}

// traffic asks continuously until stopped and records the answers.
type traffic struct {
	stop chan struct{}
	once sync.Once
	wg   sync.WaitGroup
	mu   sync.Mutex
	seen map[string]map[string]int // source and protocol to answer to count
}

func (w *world) startTraffic(sources int) *traffic {
	tr := &traffic{stop: make(chan struct{}), seen: map[string]map[string]int{}}
	w.t.Cleanup(func() { tr.end() })
	for i, proto := range slots.Protocols {
		addrs := sourcesN(sources)
		tr.wg.Go(func() {
			for n := i; ; n++ {
				select {
				case <-tr.stop:
					return
				default:
				}
				a := addrs[n%len(addrs)]
				got := ask(w.t, proto, a, loopback4)
				tr.mu.Lock()
				key := a.String() + " " + proto
				if tr.seen[key] == nil {
					tr.seen[key] = map[string]int{}
				}
				tr.seen[key][got]++
				tr.mu.Unlock()
			}
		})
	}
	return tr
}

var sourcesN = sources

// stride is the distance between tested steps. Each run starts at another one ([firstStep]). WEIR_EVERY_STEP=1 tests
// all steps (make test-every-step).
func stride() int {
	groups := underTest == spec.EngineReuseport
	switch {
	case testing.Short() && groups:
		return 50
	case testing.Short():
		return 25
	case groups:
		return nstest.Stride(4)
	}
	return nstest.Stride(2)
}

// firstStep is random, so over many runs every step is tested.
func firstStep() int { return rand.IntN(stride()) }

func (tr *traffic) end() map[string]map[string]int {
	tr.once.Do(func() { close(tr.stop) })
	tr.wg.Wait()
	return tr.seen
}

// TestApplyKilledAtEveryStep kills every change of a service at every step, under traffic. Each packet sees the old or
// the new state, and the next command recovers the rest.
func TestApplyKilledAtEveryStep(t *testing.T) { eachEngine(t, testApplyKilledAtEveryStep) }

func testApplyKilledAtEveryStep(t *testing.T) {
	for _, change := range []struct {
		name string
		to   func(w *world)
	}{
		{"seed", func(w *world) { seed := uint32(99); w.cfg.Services[0].Seed = &seed }},
		{"slots", func(w *world) { w.cfg.Services[0].Slots = 3 }},
		{"create another", func(w *world) {
			v := newWorld(w.t, spec.Options{Slots: 1}, "udp 127.77.0.1:9991")
			svc := v.cfg.Services[0]
			svc.Name = "other"
			w.cfg.Services = append(w.cfg.Services, svc)
		}},
	} {
		t.Run(change.name, func(t *testing.T) {
			a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			seed := uint32(7)
			for step := firstStep(); ; step += stride() {
				w := newWorld(t, spec.Options{Slots: 2, Seed: &seed}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
				w.member(0, a)
				w.member(1, b)
				w.apply()
				old := w.expected(24)
				tr := w.startTraffic(24)
				tr.asked(t, 24)
				change.to(w)
				finished := w.killedApply(step)
				w.apply() // recovers
				now := w.expected(24)
				tr.asked(t, 24)
				for key, answers := range tr.end() {
					for got, n := range answers {
						if got != old[key] && got != now[key] {
							t.Errorf("step %d: %s answered %d times by %s; old %s, new %s", step, key, n, got, old[key], now[key])
						}
					}
				}
				w.check(sources(24), loopback4, names(a, b, nil))
				if again := w.apply(); len(again) != 0 && change.name != "slots" {
					t.Errorf("step %d: after recovery, apply would %v", step, again)
				}
				w.remove()
				if finished {
					t.Logf("killed at each of %d steps", step)
					if step < 5 {
						t.Errorf("only %d steps: the change is not what the test means", step)
					}
					return
				}
			}
		})
	}
}

// expected returns the expected answer for each source and protocol.
func (w *world) expected(n int) map[string]string {
	out := map[string]string{}
	for _, p := range w.where(sources(n)...) {
		want := refused
		if p.Admitted {
			want = fmt.Sprint(p.PID)
		}
		for _, proto := range slots.Protocols {
			out[p.Address.String()+" "+proto] = want
		}
	}
	return out
}

// TestFirstApplyKilledAtEveryStep kills the publication of the first service at every step. Traffic sees none or all of
// it, and the next command finishes.
func TestFirstApplyKilledAtEveryStep(t *testing.T) { eachEngine(t, testFirstApplyKilledAtEveryStep) }

func testFirstApplyKilledAtEveryStep(t *testing.T) {
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	for step := firstStep(); ; step += stride() {
		w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
		w.member(0, a)
		finished := w.killedApply(step)
		for _, proto := range slots.Protocols { // not steered, steered, or not admitted yet
			if got := ask(t, proto, sources(1)[0], loopback4); got != fmt.Sprint(a.pid()) && got != refused {
				t.Errorf("step %d: %s is answered by %s", step, proto, got)
			}
		}
		w.apply()
		w.check(sources(4), loopback4, names(a))
		w.remove()
		if finished {
			t.Logf("killed at steps up to %d", step)
			return
		}
	}
}

// TestRemoveKilledAtEveryStep kills a removal at every step. The next command leaves nothing.
func TestRemoveKilledAtEveryStep(t *testing.T) { eachEngine(t, testRemoveKilledAtEveryStep) }

func testRemoveKilledAtEveryStep(t *testing.T) {
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	for step := firstStep(); ; step += stride() {
		w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
		w.member(0, a)
		w.apply()
		services := w.cfg.Services
		w.cfg.Services = nil
		finished := w.killedApply(step)
		w.apply()
		if st, err := state.Read(t.Context(), w.root); err != nil || len(st.Services) != 0 {
			t.Fatalf("step %d: left %+v, %v", step, st, err)
		}
		if _, err := os.Stat(w.root.Path()); !os.IsNotExist(err) {
			t.Errorf("step %d: pins left", step)
		}
		if got := ask(t, "udp", sources(1)[0], loopback4); got != fmt.Sprint(a.pid()) {
			t.Errorf("step %d: the kernel's own choice is %s", step, got)
		}
		w.cfg.Services = services
		if finished {
			return
		}
	}
}

// TestTwoCommandsAtOnce repeatedly kills a process with the lock, beside a working one. Nothing is corrupted.
func TestTwoCommandsAtOnce(t *testing.T) { eachEngine(t, testTwoCommandsAtOnce) }

func testTwoCommandsAtOnce(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.apply()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 6 {
				w.killedApply((i*7 + n*5) % 12)
			}
		})
	}
	wg.Wait()
	w.apply()
	w.check(sources(8), loopback4, names(a, nil))
	if strings.Contains(strings.Join(w.apply(), " "), "service svc:") && !slices.Equal(w.apply(), nil) {
		t.Error("not settled")
	}
}

// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
	"github.com/weir-project/weir/service"
)

// world is a host with guards: its own namespace and pins.
type world struct {
	t    testing.TB
	root *kernel.Root

	fails []string // accepted errors of an apply killed after its end
	died  string   // step of the last kill by killedApply
}

func newWorld(t testing.TB, needs ...kernel.Need) *world {
	t.Helper()
	need(t, needs...)
	nstest.Enter(t)
	return &world{t: t, root: kernel.OpenRoot(nstest.BPFFS + "/weir")}
}

// guarded returns a service with a guard.
func guarded(t testing.TB, name string, o Options, listen ...string) Service {
	t.Helper()
	s := Service{Spec: service.Spec{Name: name}, Options: o}
	for _, text := range listen {
		l, err := service.ParseListen(text)
		if err != nil {
			t.Fatal(err)
		}
		s.Listen = append(s.Listen, l)
	}
	return s
}

func (w *world) lock() *kernel.WriteLock {
	w.t.Helper()
	l, err := w.root.Lock(context.Background())
	if err != nil {
		w.t.Fatal(err)
	}
	return l
}

// apply makes these services' guards the only ones and returns the plan.
func (w *world) apply(services ...Service) []string {
	w.t.Helper()
	said, err := applyTo(w.root, Config{services})
	if err != nil {
		w.t.Fatal(err)
	}
	return said
}

func applyTo(root *kernel.Root, c Config) (said []string, err error) {
	return featuretest.Apply(context.Background(), root, Feature{}, c)
}

// state returns the state of one guard.
func (w *world) state(name string) GuardState {
	w.t.Helper()
	st, err := readGuards(context.Background(), w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, g := range st.Guards {
		if g.Service == name {
			return g
		}
	}
	w.t.Fatalf("no guard of service %s in %+v", name, st.Guards)
	return GuardState{}
}

// pinned lists the remaining pins below the root.
func (w *world) pinned() (out []string) {
	w.t.Helper()
	err := filepath.WalkDir(w.root.Path(), func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, strings.TrimPrefix(path, w.root.Path()))
		}
		return nil
	})
	if err != nil && !os.IsNotExist(err) {
		w.t.Fatal(err)
	}
	return out
}

// runApply applies a configuration and is killed at a step.
func runApply(args []string) error {
	var c Config
	if err := json.Unmarshal([]byte(args[2]), &c); err != nil {
		return err
	}
	kerneltest.DieAt(args[1])
	_, err := applyTo(kernel.OpenRoot(args[0]), c)
	return err
}

// killedApply applies in a process killed after the given number of steps. It reports whether the
// process ended first.
func (w *world) killedApply(steps int, services ...Service) (ended bool) {
	w.t.Helper()
	c := Config{services}
	if errs := c.Validate(); len(errs) > 0 {
		w.t.Fatal(errs)
	}
	data, err := json.Marshal(c)
	if err != nil {
		w.t.Fatal(err)
	}
	step := kerneltest.Killed(w.t, nstest.Child("apply", w.root.Path(), steps, string(data)), w.fails...)
	if step != "" {
		w.died = step
	}
	return step == ""
}

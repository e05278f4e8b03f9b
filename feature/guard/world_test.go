// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
	"github.com/weir-project/weir/service"
)

// world is a host with guards: a namespace and pins of its own.
type world struct {
	t    testing.TB
	root *kernel.Root

	fails string // an apply that is killed later than it ends may end with an error that says this
	died  string // the step at which killedApply killed
}

func newWorld(t testing.TB, needs ...kernel.Need) *world {
	t.Helper()
	need(t, needs...)
	nstest.Enter(t)
	return &world{t: t, root: kernel.OpenRoot(nstest.BPFFS + "/weir")}
}

// guarded is a service with a guard.
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

// apply makes the world's guards these, and returns what the plan said.
func (w *world) apply(services ...Service) []string {
	w.t.Helper()
	said, err := applyTo(w.root, Config{services})
	if err != nil {
		w.t.Fatal(err)
	}
	return said
}

func applyTo(root *kernel.Root, c Config) (said []string, err error) {
	ctx := context.Background()
	if errs := c.Validate(); len(errs) > 0 {
		return nil, errs[0]
	}
	l, err := root.Lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	if err := Recover(l); err != nil {
		return nil, err
	}
	st, err := ReadState(ctx, root)
	if err != nil {
		return nil, err
	}
	p, err := Feature{}.Plan(ctx, st, c)
	if err != nil {
		return nil, err
	}
	for _, s := range p.Steps {
		said = append(said, s.String())
	}
	return said, p.Apply(ctx, l, nil)
}

// state reads one guard.
func (w *world) state(name string) GuardState {
	w.t.Helper()
	st, err := ReadState(context.Background(), w.root)
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

// pinned lists what is left below the root.
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

// runApply applies a configuration and dies at a step of it.
func runApply(args []string) error {
	dieAt, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	var c Config
	if err := json.Unmarshal([]byte(args[2]), &c); err != nil {
		return err
	}
	n := 0
	kerneltest.OnStep(func(step string) {
		if n++; n > dieAt {
			fmt.Println(step)
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	})
	_, err = applyTo(kernel.OpenRoot(args[0]), c)
	return err
}

// killedApply applies in a process that is killed after so many steps. It says whether the process ended first.
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
	out, err := nstest.Child("apply", w.root.Path(), steps, string(data)).CombinedOutput()
	if err == nil {
		return true
	}
	if !strings.Contains(err.Error(), "killed") {
		if w.fails != "" && strings.Contains(string(out), w.fails) {
			return true
		}
		w.t.Fatalf("%v: %s", err, out)
	}
	w.died = strings.TrimSpace(string(out))
	return false
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// playCrash runs an operation on the instance below a root, and is killed at step number STEP, counted from 0: KIND
// OPERATION STEP ROOT.
func playCrash(f []string) error {
	if f[0] == "twostep" {
		kerneltest.WithoutExchange()
	}
	kerneltest.DieAt(f[2])
	l, err := OpenRoot(f[3]).Lock(context.Background())
	if err != nil {
		return err
	}
	defer l.Unlock()
	switch f[1] {
	case "publish", "replace":
		return publish(l, instance, 2)
	case "remove":
		return l.Remove(instance)
	}
	return nil // Lock has recovered
}

// crash runs playCrash and returns the step of the kill, or "" if it ended by itself.
func crash(t *testing.T, kind, operation string, step int, r *Root) string {
	t.Helper()
	return kerneltest.Killed(t, nstest.Child("crash", kind, operation, step, r.path))
}

// After a kill at any step, the next lock holder finds the old state or the new one, and nothing half done. Earlier
// readers see the same.
func TestKilledAtAnyStep(t *testing.T) {
	for _, c := range []struct {
		operation string
		before    uint64   // existing version, 0: none
		after     []uint64 // versions possible for the next Lock
		between   []uint64 // versions possible for a reader before that
	}{
		{"publish", 0, []uint64{0, 2}, []uint64{0, 2}},
		{"replace", 1, []uint64{1, 2}, []uint64{1, 2}},
		{"remove", 1, []uint64{0, 1}, []uint64{0, 1}},
	} {
		for _, kind := range []string{"exchange", "twostep"} {
			if kind == "twostep" {
				if c.operation != "replace" {
					continue // the same
				}
				c.between = []uint64{0, 1, 2} // killed between the two renames
			}
			t.Run(c.operation+"/"+kind, func(t *testing.T) {
				if c.operation+"/"+kind == "replace/exchange" {
					needExchange(t)
				}
				var steps []string
				for n := 0; ; n++ {
					step := oneCrash(t, kind, c.operation, n, c.before, c.between, c.after)
					if step == "" {
						break
					}
					steps = append(steps, step)
				}
				t.Log("killed at", strings.Join(steps, ", "))
				checkSteps(t, c.operation, kind, steps)
			})
		}
	}
}

// needExchange skips the test if bpffs cannot exchange two directories.
func needExchange(t *testing.T) {
	t.Helper()
	r := newRoot(t)
	for _, d := range []string{"", "/a", "/b"} {
		if err := os.Mkdir(r.path+d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.exchange(r.path+"/a", r.path+"/b"); errors.Is(err, unix.EINVAL) {
		t.Skip("need: kernel 5.16, for RENAME_EXCHANGE on bpffs")
	} else if err != nil {
		t.Fatal(err)
	}
}

// checkSteps checks that the test covers the critical steps.
func checkSteps(t *testing.T, operation, kind string, steps []string) {
	t.Helper()
	want := map[string][]string{
		"publish/exchange": {"publish:mkdir", "publish:pin link_lookup", "publish:pin meta", "publish:staged", "publish:renamed"},
		"replace/exchange": {"publish:mkdir", "publish:pin meta", "publish:staged", "publish:exchanged", "remove:unpinned"},
		"replace/twostep":  {"publish:mkdir", "publish:pin meta", "publish:staged", "publish:retired", "publish:replaced", "remove:unpinned"},
		"remove/exchange":  {"remove:retired", "remove:unpinned"},
	}[operation+"/"+kind]
	for _, w := range want {
		if !slices.Contains(steps, w) {
			t.Errorf("was never killed at %s", w)
		}
	}
}

func oneCrash(t *testing.T, kind, operation string, n int, before uint64, between, after []uint64) string {
	t.Helper()
	r := newRoot(t)
	l := lock(t, r)
	if before != 0 {
		if err := publish(l, instance, before); err != nil {
			t.Fatal(err)
		}
	}
	l.Unlock()
	step := crash(t, kind, operation, n, r)
	where := fmt.Sprintf("killed at step %d (%s)", n, step)
	v, err := version(r, instance)
	if err != nil || !slices.Contains(between, v) {
		t.Errorf("%s: a reader sees version %d, %v; want one of %v", where, v, err, between)
	}
	// The recovering command may be killed too.
	crash(t, kind, "recover", 0, r)
	l = lock(t, r)
	recovered, err := version(l, instance)
	if err != nil || !slices.Contains(after, recovered) {
		t.Errorf("%s: recovered to version %d, %v; want one of %v", where, recovered, err, after)
	}
	if v != 0 && recovered != v && operation != "remove" {
		t.Errorf("%s: readers saw version %d, recovered to %d", where, v, recovered)
	}
	if left := inTransit(t, r); len(left) > 0 {
		t.Errorf("%s: left over: %v", where, left)
	}
	if step == "" && recovered != after[len(after)-1] && operation != "remove" || step == "" && recovered != 0 && operation == "remove" {
		t.Errorf("%s was not killed, and left version %d", operation, recovered)
	}
	afterwards(t, l, where)
	return step
}

// inTransit lists staged and retired directories.
func inTransit(t *testing.T, r *Root) []string {
	t.Helper()
	return slices.DeleteFunc(tree(t, r), func(s string) bool { return !strings.Contains(s, "+") })
}

// afterwards checks that the recovered state can be replaced and removed, and leaves nothing in the kernel.
func afterwards(t *testing.T, l *WriteLock, where string) {
	t.Helper()
	if err := publish(l, instance, 3); err != nil {
		t.Errorf("%s: publish afterwards: %v", where, err)
	}
	wantVersion(t, l, instance, 3)
	if err := l.Remove(instance); err != nil {
		t.Errorf("%s: remove afterwards: %v", where, err)
	}
	l.Unlock()
	if left := tree(t, l.Root); len(left) > 0 {
		t.Errorf("%s: removed, and there is still %v", where, left)
	}
	nstest.Until(t, where+": no link is left attached", func() bool { return lookupLinks(t) == 0 })
}

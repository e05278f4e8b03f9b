// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// playChange applies filters and is killed at a step: ROOT STEP FILE.
func playChange(args []string) error {
	data, err := os.ReadFile(args[2])
	if err != nil {
		return err
	}
	var filters []Filter
	if err := json.Unmarshal(data, &filters); err != nil {
		return err
	}
	kerneltest.DieAt(args[1])
	_, err = applyTo(context.Background(), kernel.OpenRoot(args[0]), filters...)
	return err
}

// crash applies filters in a process killed at a step, counted from 0. It returns the name of the
// step, or "" if there were fewer.
func (w *world) crash(step int, filters ...Filter) string {
	w.t.Helper()
	data, err := json.Marshal(filters)
	if err != nil {
		w.t.Fatal(err)
	}
	file := filepath.Join(w.t.TempDir(), "filters.json")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		w.t.Fatal(err)
	}
	return kerneltest.Killed(w.t, nstest.Child("change", w.root.Path(), step, file))
}

// A process is killed at any step of a creation, change, move or removal. The filter then drops by
// the old rules or by the new ones, during a move by both. The next command completes the change.
func TestKilledAtEveryStep(t *testing.T) {
	const none = "5001/4 5001/6 5002/4 5002/6"
	const first, second = "5002/4 5002/6", "5001/4 5001/6"
	for _, h := range hooks {
		if h == HookXDPGeneric {
			continue // the same calls as xdp
		}
		other := HookTCX
		if h == HookTCX {
			other = HookNFT
		}
		if h == HookNFT {
			other = HookClsact
		}
		for _, c := range []struct {
			name          string
			before, after func(w *world) []Filter
			from, to      string
			both          bool
		}{
			{"create", func(*world) []Filter { return nil }, func(w *world) []Filter { return []Filter{w.filter(h, drops(5002))} }, none, second, false},
			{"change", func(w *world) []Filter { return []Filter{w.filter(h, drops(5001))} },
				func(w *world) []Filter { return []Filter{w.filter(h, drops(5002))} }, first, second, false},
			{"move", func(w *world) []Filter { return []Filter{w.filter(h, drops(5001))} },
				func(w *world) []Filter { return []Filter{w.filter(other, drops(5002))} }, first, second, true},
			{"remove", func(w *world) []Filter { return []Filter{w.filter(h, drops(5001))} }, func(*world) []Filter { return nil }, first, none, false},
		} {
			t.Run(string(h)+"/"+c.name, func(t *testing.T) {
				t.Parallel() // mostly waiting for the kernel
				needHook(t, h)
				needHook(t, other)
				w := newWorld(t)
				seen := []string{}
				stride := 1
				if testing.Short() { // an emulated kernel is slow
					stride = 5
				}
				for n := 0; ; n += stride {
					w.apply(c.before(w)...)
					step := w.crash(n, c.after(w)...)
					if step == "" {
						break
					}
					seen = append(seen, step)
					const untouched = "5003/4 5003/6" // by any of the rules
					all := w.flowsOf(untouched, 5001, 5002, 5003)
					got := strings.TrimSuffix(strings.TrimSuffix(all, untouched), " ")
					if !strings.HasSuffix(all, untouched) {
						t.Errorf("killed at step %d (%s): %q arrived, but not %q", n, step, all, untouched)
					}
					for _, family := range []string{"/4", "/6"} { // links change one by one
						g := of(got, family)
						if g != of(c.from, family) && g != of(c.to, family) && !(c.both && g == "") {
							t.Errorf("killed at step %d (%s): %q arrived, want %q or %q", n, step, got, c.from, c.to)
						}
					}
					w.apply(c.after(w)...)
					// The kernel releases a link asynchronously if no command detached it before
					// unpinning.
					nstest.Until(t, fmt.Sprintf("killed at step %d (%s), and applied again: %q arrive", n, step, c.to),
						func() bool { return w.flows(5001, 5002) == c.to })
					w.want(fmt.Sprintf("killed at step %d (%s), and applied again", n, step), c.to, 5001, 5002)
					w.clean(fmt.Sprintf("killed at step %d (%s)", n, step))
					if again := w.apply(c.after(w)...); len(again) > 0 {
						t.Errorf("killed at step %d (%s): applied a second time: %q", n, step, again)
					}
				}
				if len(seen) < 3/stride {
					t.Errorf("killed only at steps %q", seen)
				}
				t.Log(len(seen), "steps:", strings.Join(seen, ", "))
			})
		}
	}
}

// of filters flows by family.
func of(flows, family string) string {
	var out []string
	for _, f := range strings.Fields(flows) {
		if strings.HasSuffix(f, family) {
			out = append(out, f)
		}
	}
	return strings.Join(out, " ")
}

// clean checks that every filter is attached and no temporary file remains.
func (w *world) clean(when string) {
	w.t.Helper()
	for _, f := range w.state().Filters {
		for _, p := range f.Attachments {
			if !p.Attached || p.Problem != "" {
				w.t.Errorf("%s: place %+v", when, p)
			}
		}
		if f.Problem != "" {
			w.t.Errorf("%s: %s", when, f.Problem)
		}
	}
	filepath.WalkDir(w.root.Path(), func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.Contains(strings.TrimPrefix(path, w.root.Path()), "+") && d.Name() != "+lock" || strings.HasPrefix(filepath.Base(path), "prog_") {
			w.t.Errorf("%s: left over: %s", when, path)
		}
		return nil
	})
}

// After a kill during a change to many rules and a long list, the next command reloads the new
// program. It reuses the pinned maps and does not need the list's file.
func TestMendsManyRules(t *testing.T) {
	for _, h := range []Hook{HookTCX, HookNetfilter, HookNFT, HookClsact} {
		t.Run(string(h), func(t *testing.T) {
			t.Parallel()
			needHook(t, h)
			w := newWorld(t)
			few, many := w.filter(h, drops(5001)), w.filter(h, Rule{Name: "listed", Match: Expression{Text: "ip6.src in $bad"}, Action: Drop})
			for i := range 300 {
				many.Rules = append(many.Rules, drops(5002+i))
			}
			many.Lists = map[string]string{"bad": listOf(t, 2000, "2001:db8::/32")}
			for n := 0; ; n++ {
				w.apply(few)
				step := w.crash(n, many)
				if step == "" {
					t.Fatal("no change was killed after its beginning")
				}
				if step == "upgrade:begun" {
					break
				}
			}
			if err := os.Remove(many.Lists["bad"]); err != nil {
				t.Fatal(err)
			}
			l, err := w.root.Lock(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			err = recoverAll(l)
			l.Unlock()
			if err != nil {
				t.Fatal(err)
			}
			w.want("recovered", "5001/4 5001/6", 5001, 5002, 5301)
			w.clean("recovered")
			if n := len(w.one().Rules); n != 301 {
				t.Errorf("%d rules", n)
			}
		})
	}
}

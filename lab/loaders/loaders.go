// SPDX-License-Identifier: Apache-2.0

// Package loaders runs weir beside other loaders of BPF programs: cilium/ebpf's links, libxdp's xdp-loader,
// tc. Each side is first, restarts and is removed in turn, and no program of the other side may be removed
// with it.
package loaders

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/lab"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "loaders",
		Short: "weir beside cilium/ebpf, xdp-loader and tc at XDP, tcx and sk_lookup: no side removes the other's programs",
		Run:   run,
		Next: []string{
			"weir-lab run loaders --quick --json   the findings for a program",
			"weir filter list   position of a filter among the programs at its hook",
		},
	})
}

// experiment is one run.
type experiment struct {
	env     *lab.Env
	result  *lab.Result
	world   *world
	removed map[side]int
	counts  map[string]int
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	if e.Control {
		return errors.New("loaders has no control run: each run already includes one")
	}
	x := &experiment{env: e, result: r, removed: map[side]int{}, counts: map[string]int{}}
	var err error
	if x.world, err = newWorld(e); err != nil {
		return err
	}
	missing := false
	for _, l := range loaders {
		if l.tool != "" {
			if _, err := lab.Find(l.tool); err != nil {
				r.Skip("%s is not installed: weir was not tested beside it", l.tool)
				missing = true
				continue
			}
		}
		for _, h := range l.hooks {
			for _, first := range []side{theirs, ours} {
				if err := x.pair(ctx, l, h, first); err != nil {
					return fmt.Errorf("weir at %s beside %s, %s first: %w", h, l.name, first, err)
				}
			}
			x.counts["pairs"]++
		}
	}
	if err := x.control(ctx); err != nil {
		return fmt.Errorf("control: %w", err)
	}
	x.claims(missing)
	return nil
}

// claims evaluates weir's promises about foreign programs.
func (x *experiment) claims(missing bool) {
	for name, n := range x.counts {
		x.result.Set("loaders_"+name, float64(n))
	}
	for _, s := range []side{ours, theirs} {
		x.result.Set("loaders_removed_"+string(s), float64(x.removed[s]))
	}
	claim := func(text, metric, want string) { x.result.Claim(lab.Correctness, text, metric, want) }
	if !missing {
		claim("pairs of a foreign loader and a hook of weir", "loaders_pairs", "== 9")
		claim("refused second sides of pairs at XDP", "loaders_refused", "== 12")
		claim("weir's refusals naming the program at XDP", "loaders_owner_named", "== 6")
		claim("pairs at other hooks with programs of both sides attached", "loaders_both_stand", "== 12")
	}
	claim("weir's programs removed by another loader", "loaders_removed_ours", "== 0")
	claim("foreign programs removed by weir", "loaders_removed_theirs", "== 0")
	claim("control: weir's program removed on purpose and counted", "loaders_control_ours", "== 1")
	claim("control: foreign program removed on purpose and counted", "loaders_control_theirs", "== 1")
}

// act runs an action of one side, and counts removed programs of the other side.
func (x *experiment) act(who side, do func() error) error {
	before, err := x.world.programs()
	if err != nil {
		return err
	}
	acted := do()
	after, err := x.world.programs()
	if err != nil {
		return err
	}
	for _, p := range before {
		if p.side() != who && !slices.Contains(after, p) {
			x.removed[p.side()]++
			x.result.Note("program %d %q at %s was removed by the other side", p.id, p.name, p.hook)
		}
	}
	return acted
}

// control removes a program of each side on purpose: the count must include it.
func (x *experiment) control(ctx context.Context) error {
	kept, notes := x.removed, len(x.result.Notes)
	x.removed = map[side]int{}
	w, l := x.world, loaders[0]
	w.weir.Rewrite(w.config(hookIngress))
	err := errors.Join(l.load(ctx, w, hookIngress), w.weir.Apply(ctx),
		x.act(ours, func() error { return l.unload(ctx, w, hookIngress) }),
		x.act(theirs, func() error { return w.weir.Remove(ctx) }))
	x.counts["control_ours"], x.counts["control_theirs"] = x.removed[ours], x.removed[theirs]
	x.removed, x.result.Notes = kept, x.result.Notes[:notes]
	return err
}

// pair runs weir and a loader at a device, restarts each, and removes each.
func (x *experiment) pair(ctx context.Context, l loader, h hookName, first side) error {
	x.env.Watch.Log("weir at %s beside %s, %s first", h, l.name, first)
	w := x.world
	w.weir.Rewrite(w.config(h))
	load := func() error { return x.act(theirs, func() error { return l.load(ctx, w, l.at(h)) }) }
	unload := func() error { return x.act(theirs, func() error { return l.unload(ctx, w, l.at(h)) }) }
	apply := func() error { return x.act(ours, func() error { return w.weir.Apply(ctx) }) }
	restart := func() error { return x.act(ours, func() error { return w.restart(ctx) }) }
	steps := []func() error{load, apply}
	if first == ours {
		steps = []func() error{apply, load}
	}
	if err := steps[0](); err != nil {
		return err
	}
	if l.exclusive(h) {
		if err := x.refused(first, steps[1]); err != nil {
			return err
		}
		if first == theirs {
			return errors.Join(x.refused(first, restart), unload(), load(), unload(), x.removeOurs(ctx), x.empty(ctx))
		}
		_ = unload() // may fail: the program belongs to weir
		return errors.Join(restart(), x.refused(first, load), x.removeOurs(ctx), x.empty(ctx))
	}
	if err := steps[1](); err != nil {
		return err
	}
	if err := x.bothStand(); err != nil {
		return err
	}
	return errors.Join(restart(), unload(), load(), restart(), x.removeOurs(ctx), unload(), x.empty(ctx))
}

// removeOurs removes weir.
func (x *experiment) removeOurs(ctx context.Context) error {
	return x.act(ours, func() error { return x.world.weir.Remove(ctx) })
}

// empty waits until nothing is attached, so the next pair begins in the same state.
func (x *experiment) empty(ctx context.Context) error {
	return x.world.wait(ctx, func(all []program) (bool, error) { return len(all) == 0, nil })
}

func (x *experiment) bothStand() error {
	all, err := x.world.programs()
	if err != nil {
		return err
	}
	if count(all, ours) == 0 || count(all, theirs) == 0 {
		return fmt.Errorf("not both sides are attached: %v", all)
	}
	x.counts["both_stand"]++
	return nil
}

// refused runs the step of the second side. It must fail at XDP. weir's error names the other program.
func (x *experiment) refused(first side, second func() error) error {
	all, err := x.world.programs()
	if err != nil {
		return err
	}
	err = second()
	if err == nil {
		return errors.New("two programs at one XDP hook")
	}
	x.counts["refused"]++
	if first == theirs {
		for _, p := range all {
			if strings.Contains(err.Error(), fmt.Sprintf("%d %q", p.id, p.name)) {
				x.counts["owner_named"]++
			}
		}
	}
	return nil
}

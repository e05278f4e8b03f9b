// SPDX-License-Identifier: Apache-2.0

// Package demo holds the demonstrations. Each shows one system of weir on the user's own machine, in network
// namespaces of its own, with real software. A demonstration is one file, found by its name.
package demo

import (
	"context"
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/weir-project/weir/lab"
)

// Main is the name of the demonstration of weir's main job.
const Main = "telemetry"

// Demo is a demonstration.
type Demo struct {
	Name  string // argument of `weir-lab demo`
	Short string // one line for the list
	Long  bool   // may take 120 s, not 60 s
	// Needs lists the programs to install.
	Needs []string
	// Run shows the system. It leaves the cleanup to the stage's Env. A failed check is not an error.
	Run func(ctx context.Context, s *Stage) error
}

var demos = map[string]Demo{}

// Register adds a demonstration to the table. The files of this package call it in their init functions. It
// panics if the name is taken.
func Register(d Demo) {
	if _, taken := demos[d.Name]; taken {
		panic("demo: two demonstrations named " + d.Name)
	}
	demos[d.Name] = d
}

// All lists the demonstrations by name, the main one first.
func All() []Demo {
	all := make([]Demo, 0, len(demos))
	for _, d := range demos {
		all = append(all, d)
	}
	sort.Slice(all, func(i, j int) bool {
		a, b := all[i].Name, all[j].Name
		return a == Main || b != Main && a < b
	})
	return all
}

// Names lists the names of the demonstrations, the main one first.
func Names() (names []string) {
	for _, d := range All() {
		names = append(names, d.Name)
	}
	return names
}

// Lookup returns the demonstration of this name. The error lists the known names.
func Lookup(name string) (Demo, error) {
	if d, ok := demos[name]; ok {
		return d, nil
	}
	return Demo{}, fmt.Errorf("unknown demonstration %q; known: %s", name, strings.Join(Names(), ", "))
}

// Limit is the longest time of the demonstration on an idle machine.
func (d Demo) Limit() time.Duration {
	if d.Long {
		return 120 * time.Second
	}
	return 60 * time.Second
}

// Audience describes the spectators.
type Audience struct {
	Reads bool   // they need time to read
	Still func() // keeps the present screen for a picture; nil: no picture
}

// Play runs the demonstration as an experiment of the lab: it removes all objects, and counts the leftovers.
// It also returns the summary, in at most 20 lines.
func (d Demo) Play(ctx context.Context, o lab.Options, a Audience) (*lab.Result, []string, error) {
	var stage *Stage
	begin := time.Now()
	r, err := lab.Execute(ctx, lab.Experiment{Name: d.Name, Short: d.Short, Run: func(ctx context.Context, e *lab.Env, r *lab.Result) error {
		stage = &Stage{Env: e, Result: r, audience: a}
		for _, program := range d.Needs {
			if _, err := lab.Find(program); err != nil {
				return fmt.Errorf("%w: sudo ./bootstrap --install demo installs it", err)
			}
		}
		err := d.Run(ctx, stage)
		if err == nil {
			err = stage.Pace(ctx, 2*time.Second) // the last picture
		}
		return err
	}}, o)
	r.Set("seconds", time.Since(begin).Seconds())
	if err != nil || stage == nil {
		return r, nil, err
	}
	return r, stage.summary(r), nil
}

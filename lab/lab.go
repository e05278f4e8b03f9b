// SPDX-License-Identifier: Apache-2.0

// Package lab holds the experiments to reproduce weir's claims on real software. An experiment creates and
// removes its own network namespaces, runs real daemons over real sockets, and measures. The measurements
// end in claims, each true or false. Only cmd/weir-lab uses the package. docs/RESULTS.md is generated from
// its output.
package lab

import (
	"context"
	"fmt"
	"sort"
)

// Size selects the thoroughness of a run.
type Size int

const (
	Full  Size = iota // size of docs/RESULTS.md; minutes
	Quick             // the same claims, at most 60 s
	Smoke             // correctness claims only, at most 30 s; used by CI
)

func (s Size) String() string { return [...]string{"full", "quick", "smoke"}[s] }

// Experiment reproduces one claim of weir.
type Experiment struct {
	Name  string // argument of `weir-lab run`
	Short string // one line for `weir-lab list`
	// Run performs the experiment and reports its findings to r. It leaves the cleanup to e: e tracks every
	// process and namespace it started. An error means no result; a failed claim is not an error.
	Run func(ctx context.Context, e *Env, r *Result) error
	// Next suggests follow-ups to a person watching the run, one a line.
	Next []string
}

var experiments = map[string]Experiment{}

// Register adds an experiment to the table. Packages below lab/ call it in their init functions. It panics
// if the name is taken.
func Register(x Experiment) {
	if _, taken := experiments[x.Name]; taken {
		panic("lab: two experiments named " + x.Name)
	}
	experiments[x.Name] = x
}

// Experiments lists the registered experiments by name.
func Experiments() []Experiment {
	all := make([]Experiment, 0, len(experiments))
	for _, x := range experiments {
		all = append(all, x)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
	return all
}

// Lookup returns the experiment of this name. The error lists the known names.
func Lookup(name string) (Experiment, error) {
	if x, ok := experiments[name]; ok {
		return x, nil
	}
	var names []string
	for _, x := range Experiments() {
		names = append(names, x.Name)
	}
	return Experiment{}, fmt.Errorf("unknown experiment %q; known: %v", name, names)
}

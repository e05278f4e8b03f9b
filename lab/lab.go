// SPDX-License-Identifier: Apache-2.0

// Package lab holds the experiments that reproduce the claims of the product on real software: network
// namespaces that it makes and removes itself, real daemons, real sockets, and measurements that end in
// claims which hold or do not. Only its own cmd/weir-lab uses it; docs/RESULTS.md is made of its output.
package lab

import (
	"context"
	"fmt"
	"sort"
)

// Size is how thorough a run is.
type Size int

const (
	Full  Size = iota // what docs/RESULTS.md shows; minutes
	Quick             // the same claims, at most 60 s
	Smoke             // correctness claims only, at most 30 s; what CI runs
)

func (s Size) String() string { return [...]string{"full", "quick", "smoke"}[s] }

// Experiment reproduces one claim of the product.
type Experiment struct {
	Name  string // what `weir-lab run` takes
	Short string // one line for `weir-lab list`
	// Run does it. It reports its findings to r and must leave cleaning up to e, which knows every process
	// and namespace it started. An error means that there is no result; a claim that fails is none.
	Run func(ctx context.Context, e *Env, r *Result) error
	// Next tells a person who watched it what to try now, a line each.
	Next []string
}

var experiments = map[string]Experiment{}

// Register adds an experiment to the table; packages below lab/ do so when they are loaded. It panics if
// the name is taken.
func Register(x Experiment) {
	if _, taken := experiments[x.Name]; taken {
		panic("lab: two experiments named " + x.Name)
	}
	experiments[x.Name] = x
}

// Experiments lists what is registered, by name.
func Experiments() []Experiment {
	all := make([]Experiment, 0, len(experiments))
	for _, x := range experiments {
		all = append(all, x)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
	return all
}

// Lookup returns the experiment of that name; the error lists the names there are.
func Lookup(name string) (Experiment, error) {
	if x, ok := experiments[name]; ok {
		return x, nil
	}
	var names []string
	for _, x := range Experiments() {
		names = append(names, x.Name)
	}
	return Experiment{}, fmt.Errorf("no experiment is named %q; there are: %v", name, names)
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/host"
)

// Feature describes a feature's command file: its additions to weir beside the commands common to all features.
type Feature struct {
	Name     string   // feature name
	Overview []string // lines of weir --help: "weir guard status|limits of floods: …"
	Commands func(g *Globals) []*cobra.Command
	// Summary prints the feature's part of weir status, a line for each object. others reports whether another feature
	// prints something.
	Summary func(w io.Writer, st host.Status, others bool, now time.Time)
	Extend  func(g *Globals) Extension // nil: the feature adds nothing to weir apply
	// Names maps an argument's name in the usage, for example SERVICE, to its completions.
	Names map[string]func(host.Status) []string
	// Choices maps an argument's name in the usage, or a flag like --slot, to completions that depend on the arguments
	// before it.
	Choices map[string]Choice
}

// Choice returns completions. args are the arguments before the completed word, for a flag all of them.
type Choice func(cmd *cobra.Command, g *Globals, args []string) []string

// Extension is a feature's addition to weir apply.
type Extension interface {
	AddFlags(c *cobra.Command)
	Prepare(cfg *host.Config)                                                     // runs before the plan is made
	Foresee(cmd *cobra.Command, cfg *host.Config)                                 // prints the consequences of the change for --dry-run
	Around(cmd *cobra.Command, cfg *host.Config, change func() error) (err error) // runs change, and then the slow work caused by it
}

// featureCommands are the command files added by init functions.
var featureCommands []Feature

// Add adds the command file of a feature.
func Add(c Feature) { featureCommands = append(featureCommands, c) }

// Features returns the command files in the order of the features. A feature without a command file gets [plainFeature].
func Features() (out []Feature) {
	for _, name := range host.Features() {
		i := slices.IndexFunc(featureCommands, func(c Feature) bool { return c.Name == name })
		if i < 0 {
			out = append(out, plainFeature(name))
			continue
		}
		out = append(out, featureCommands[i])
	}
	return out
}

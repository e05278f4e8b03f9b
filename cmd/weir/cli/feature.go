// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/host"
)

// Feature is the command file of a feature: what it adds to weir beside the commands that every feature has.
type Feature struct {
	Name     string   // of the feature
	Overview []string // lines of weir --help: "weir guard status|limits of floods: …"
	Commands func(g *Globals) []*cobra.Command
	// Summary prints the feature's part of weir status, a line for each object. others reports whether another feature shows
	// something.
	Summary func(w io.Writer, st host.Status, others bool, now time.Time)
	Extend  func(g *Globals) Extension // nil: weir apply has nothing of the feature's own
	// Names complete the first argument of the feature's commands: by the argument's name in their usage.
	Names map[string]func(host.Status) []string
}

// Extension is what a feature adds to weir apply.
type Extension interface {
	AddFlags(c *cobra.Command)
	Prepare(cfg *host.Config)                                                     // before a plan is made
	Foresee(cmd *cobra.Command, cfg *host.Config)                                 // prints for --dry-run what follows from the change
	Around(cmd *cobra.Command, cfg *host.Config, change func() error) (err error) // makes the change, and does slow work that follows from it
}

// featureCommands are all command files, by their init.
var featureCommands []Feature

// Add adds the command file of a feature.
func Add(c Feature) { featureCommands = append(featureCommands, c) }

// Features are the command files in the order of the features. A feature without one has the commands of [plainFeature].
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

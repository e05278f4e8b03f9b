// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

// featureCommand is the command file of a feature: what it adds to weir beside the commands that every feature has.
type featureCommand struct {
	name     string   // of the feature
	overview []string // lines of weir --help: "weir guard status|limits of floods: …"
	commands func(g *globals) []*cobra.Command
	// summary prints the feature's part of weir status, a line for each object. others reports whether another feature shows
	// something.
	summary func(w io.Writer, st host.Status, others bool, now time.Time)
	extend  func(g *globals) applyExtension // nil: weir apply has nothing of the feature's own
	// names complete the first argument of the feature's commands: by the argument's name in their usage.
	names map[string]func(host.Status) []string
}

// applyExtension is what a feature adds to weir apply.
type applyExtension interface {
	addFlags(c *cobra.Command)
	prepare(cfg *host.Config)                                                     // before a plan is made
	foresee(cmd *cobra.Command, cfg *host.Config)                                 // prints for --dry-run what follows from the change
	around(cmd *cobra.Command, cfg *host.Config, change func() error) (err error) // makes the change, and does slow work that follows from it
}

// extensions are those of all features.
func extensions(g *globals) (out []applyExtension) {
	for _, f := range inOrder() {
		if f.extend != nil {
			out = append(out, f.extend(g))
		}
	}
	return out
}

// featureCommands are all command files, by their init.
var featureCommands []featureCommand

func addFeature(c featureCommand) { featureCommands = append(featureCommands, c) }

// inOrder are the command files in the order of the features. A feature without one has the commands of [plainFeature].
func inOrder() (out []featureCommand) {
	for _, name := range host.Features() {
		i := slices.IndexFunc(featureCommands, func(c featureCommand) bool { return c.name == name })
		if i < 0 {
			out = append(out, plainFeature(name))
			continue
		}
		out = append(out, featureCommands[i])
	}
	return out
}

// overview is the list of commands in weir --help.
func overview() string {
	lines := []string{
		"weir doctor|what this kernel and user can run, and why not",
		"weir apply -f weir.yaml|make the host match the file",
		"weir status|what is there now",
		"weir explain PACKET|why this packet goes where it goes, step by step",
	}
	for _, c := range inOrder() {
		lines = append(lines, c.overview...)
	}
	var b strings.Builder
	for _, l := range lines {
		command, does, _ := strings.Cut(l, "|")
		fmt.Fprintf(&b, "\n  %-26s %s", command, does)
	}
	return b.String()
}

// printSummaries prints what the features show in weir status.
func printSummaries(w io.Writer, st host.Status, now time.Time) {
	first := true
	for _, c := range inOrder() {
		var b strings.Builder
		c.summary(&b, st, slices.ContainsFunc(st.Shown(), func(name string) bool { return name != c.name }), now)
		if b.Len() == 0 {
			continue
		}
		if !first {
			fmt.Fprintln(w)
		}
		first = false
		_, _ = io.WriteString(w, b.String())
	}
}

// plainFeature has weir NAME status, which prints the feature's state as tables.
func plainFeature(name string) featureCommand {
	return featureCommand{
		name:     name,
		overview: []string{cmp.Or("weir "+name+" status") + "|what " + name + " has applied, and what it counts"},
		commands: func(g *globals) []*cobra.Command {
			c := &cobra.Command{Use: name, Short: "Show " + name}
			c.AddCommand(plainStatus(g, name))
			return []*cobra.Command{c}
		},
		summary: func(w io.Writer, st host.Status, _ bool, now time.Time) {
			if part := st.Part(name); part != nil {
				printTables(w, part, now)
			}
		},
	}
}

func plainStatus(g *globals, name string) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Show what " + name + " has applied, and what it counts", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := g.reader().Status(cmd.Context())
			if err != nil {
				return err
			}
			part := st.Part(name)
			if g.json {
				return printJSON(cmd, part)
			}
			printFaults(cmd.OutOrStdout(), st.Faults, name)
			if part == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "nothing of %s: weir apply -f weir.yaml makes what its section says\n", name)
				return nil
			}
			printTables(cmd.OutOrStdout(), part, time.Now())
			return nil
		},
	}
	jsonFlag(c, g)
	return c
}

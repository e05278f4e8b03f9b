// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/internal/netns"
)

// completing is the timeout for reading the names of a completion.
const completing = 2 * time.Second

// completionCommand adds cobra's completion command. Its scripts are printed to the root command's output of that
// moment. cobra itself would use the output set now.
func completionCommand(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	of, _, err := root.Find([]string{"completion"})
	if err != nil {
		return
	}
	scripts := map[string]func(w io.Writer, descriptions bool) error{
		"bash": root.GenBashCompletionV2,
		"fish": root.GenFishCompletion,
		"zsh": func(w io.Writer, descriptions bool) error {
			if descriptions {
				return root.GenZshCompletion(w)
			}
			return root.GenZshCompletionNoDesc(w)
		},
		"powershell": func(w io.Writer, descriptions bool) error {
			if descriptions {
				return root.GenPowerShellCompletionWithDesc(w)
			}
			return root.GenPowerShellCompletion(w)
		},
	}
	for _, c := range of.Commands() {
		if script := scripts[c.Name()]; script != nil {
			c.RunE = func(cmd *cobra.Command, _ []string) error {
				bare, _ := cmd.Flags().GetBool("no-descriptions") // every completion command defines the flag
				return script(cmd.OutOrStdout(), !bare)
			}
		}
	}
}

// complete completes a command's first argument, and the flags --service and --netns, with existing names. A command
// without such an argument in its usage completes nothing.
func complete(c *cobra.Command, g *cli.Globals) {
	fields := strings.Fields(c.Use)
	if len(fields) > 1 && c.ValidArgsFunction == nil && c.ValidArgs == nil && c.Parent() != nil {
		first := strings.Trim(fields[1], "[]{}")
		if first == "udp" {
			c.ValidArgsFunction = completeFirst(g, func(host.Status) []string { return []string{"udp", "tcp"} })
		}
		for _, f := range cli.Features() {
			if of := f.Names[first]; of != nil && f.Name == commandFeature(c) {
				c.ValidArgsFunction = completeFirst(g, of)
			}
		}
	}
	for flag, of := range map[string]func() []string{"service": func() []string { return completed(g, everyName("SERVICE")) }, "netns": namespaces} {
		if c.Flags().Lookup(flag) != nil {
			_ = c.RegisterFlagCompletionFunc(flag, func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
				return of(), cobra.ShellCompDirectiveNoFileComp
			})
		}
	}
}

// ownerKey is the annotation with the feature name of a command.
const ownerKey = "feature"

// commandFeature returns the feature of a command or of its nearest annotated parent, or "".
func commandFeature(c *cobra.Command) string {
	for ; c != nil; c = c.Parent() {
		if name := c.Annotations[ownerKey]; name != "" {
			return name
		}
	}
	return ""
}

// everyName returns the names of one kind from all features, sorted and unique.
func everyName(kind string) func(host.Status) []string {
	return func(st host.Status) (out []string) {
		for _, f := range cli.Features() {
			if of := f.Names[kind]; of != nil {
				out = append(out, of(st)...)
			}
		}
		slices.Sort(out)
		return slices.Compact(out)
	}
}

func completeFirst(g *cli.Globals, of func(host.Status) []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return completed(g, of), cobra.ShellCompDirectiveNoFileComp
	}
}

// completed returns names from the status, or nil if the status is unreadable.
func completed(g *cli.Globals, of func(host.Status) []string) []string {
	ctx, cancel := context.WithTimeout(context.Background(), completing)
	defer cancel()
	st, err := g.Reader().Status(ctx)
	if err != nil {
		return nil
	}
	return of(st)
}

func namespaces() []string {
	names, _ := netns.Names()
	return names
}

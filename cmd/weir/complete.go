// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
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

// complete completes a command's arguments and flags with existing names.
func complete(c *cobra.Command, g *cli.Globals) {
	if c.ValidArgsFunction == nil && c.ValidArgs == nil && c.Parent() != nil && !c.HasSubCommands() {
		c.ValidArgsFunction = argumentCompletion(g, c.Use)
	}
	flags := map[string]cli.Choice{
		"service": func(*cobra.Command, *cli.Globals, []string) []string { return completed(g, everyName("SERVICE")) },
		"netns":   func(*cobra.Command, *cli.Globals, []string) []string { return namespaces() },
	}
	for _, f := range cli.Features() {
		for name, of := range f.Choices {
			if flag, ok := strings.CutPrefix(name, "--"); ok && f.Name == commandFeature(c) {
				flags[flag] = of
			}
		}
	}
	for flag, of := range flags {
		if c.Flags().Lookup(flag) != nil {
			_ = c.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
				return of(cmd, g, args), cobra.ShellCompDirectiveNoFileComp
			})
		}
	}
	c.LocalFlags().VisitAll(func(f *pflag.Flag) { completeValue(c, f) })
}

// valueWords are the values of flags with few of them.
var valueWords = map[string][]string{
	"proto": {"tcp", "udp"}, "missing": {"tcp", "udp"}, "protect": {"link", "node", "srlg"}, "change": {"down", "up"},
	"hook": {"xdp", "xdp-generic", "tcx", "clsact", "netfilter", "nft", "socket"}, "stop": {"TERM", "QUIT", "INT", "HUP", "USR1", "USR2", "WINCH", "KILL"},
}

// pathFlags are the flags with a path as their value. Shells complete files for them, and for no other flag.
var pathFlags = []string{"root", "socket", "keeper", "pidfile", "file", "output", "sids", "vty-socket", "svg", "list", "read", "rules"}

// completeValue completes a flag's value without names of the host. Without this, shells complete files for a number.
func completeValue(c *cobra.Command, f *pflag.Flag) {
	if _, has := c.GetFlagCompletionFunc(f.Name); has || f.NoOptDefVal != "" || slices.Contains(pathFlags, f.Name) {
		return
	}
	_ = c.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(valueWords[f.Name], cobra.ShellCompDirectiveNoFileComp))
}

// argumentCompletion completes the arguments of a usage: names, or files for FILE.
func argumentCompletion(g *cli.Globals, use string) cobra.CompletionFunc {
	words := arguments(use)
	after := cobra.ShellCompDirectiveNoFileComp
	if strings.Contains(use, " -- ") {
		after = cobra.ShellCompDirectiveDefault // a program and its arguments
	}
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		at := len(args)
		if last := len(words) - 1; at > last && last >= 0 && strings.HasSuffix(words[last], "…") {
			at = last
		}
		if at >= len(words) {
			return nil, after
		}
		if words[at] == "FILE" {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return choices(cmd, g, strings.TrimSuffix(words[at], "…"), args), cobra.ShellCompDirectiveNoFileComp
	}
}

// arguments returns the names of the arguments in a usage, in their order, up to the first flag. A list ends with "…".
func arguments(use string) (out []string) {
	use = strings.NewReplacer("[", "", "]", "", "{", "", "}", "", " | ", "|").Replace(use)
	for _, word := range strings.Fields(use)[1:] {
		if strings.HasPrefix(word, "-") {
			break
		}
		out = append(out, word)
	}
	return out
}

// choices returns the completions of an argument by its name. An alternative in small letters is itself a completion:
// tcp|udp.
func choices(cmd *cobra.Command, g *cli.Globals, name string, args []string) (out []string) {
	for _, f := range cli.Features() {
		if f.Name != commandFeature(cmd) {
			continue
		}
		if of := f.Choices[name]; of != nil {
			return of(cmd, g, args)
		}
		for part := range strings.SplitSeq(name, "|") {
			if of := f.Names[part]; of != nil {
				out = append(out, completed(g, of)...)
			}
		}
	}
	for part := range strings.SplitSeq(name, "|") {
		if part == strings.ToLower(part) && !strings.HasPrefix(part, "-") {
			out = append(out, part)
		}
	}
	return out
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

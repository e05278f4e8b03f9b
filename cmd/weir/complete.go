// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/internal/netns"
)

// completing bounds how long the shell waits for names.
const completing = 2 * time.Second

// completionCommand adds cobra's own command, whose scripts go to where the root's output
// goes when they are printed: cobra takes the output of this moment.
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
				bare, _ := cmd.Flags().GetBool("no-descriptions") // each has the flag
				return script(cmd.OutOrStdout(), !bare)
			}
		}
	}
}

// complete has a command's first argument, and flags that name things, completed with the
// names that there are. A command whose usage has no such argument completes nothing.
func complete(c *cobra.Command, g *globals) {
	fields := strings.Fields(c.Use)
	if len(fields) > 1 && c.ValidArgsFunction == nil && c.ValidArgs == nil {
		first := strings.Trim(fields[1], "[]{}")
		switch {
		case first == "SERVICE" && c.Parent().Name() != "front":
			c.ValidArgsFunction = completeFirst(g, services)
		case first == "NAME" && c.Parent() != nil && c.Parent().Name() == "filter":
			c.ValidArgsFunction = completeFirst(g, filters)
		case first == "PATH":
			c.ValidArgsFunction = completeFirst(g, paths)
		case first == "udp":
			c.ValidArgsFunction = completeFirst(g, func(host.Status) []string { return []string{"udp", "tcp"} })
		}
	}
	for flag, of := range map[string]func() []string{"service": func() []string { return completed(g, services) }, "netns": namespaces} {
		if c.Flags().Lookup(flag) != nil {
			_ = c.RegisterFlagCompletionFunc(flag, func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
				return of(), cobra.ShellCompDirectiveNoFileComp
			})
		}
	}
}

func completeFirst(g *globals, of func(host.Status) []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return completed(g, of), cobra.ShellCompDirectiveNoFileComp
	}
}

// completed asks for names; where nothing can be read there are none.
func completed(g *globals, of func(host.Status) []string) []string {
	ctx, cancel := context.WithTimeout(context.Background(), completing)
	defer cancel()
	st, err := g.reader().Status(ctx)
	if err != nil {
		return nil
	}
	return of(st)
}

func services(st host.Status) (out []string) {
	for _, s := range st.Services {
		out = append(out, s.Name)
	}
	return out
}

func filters(st host.Status) (out []string) {
	for _, f := range st.Filters {
		out = append(out, f.Name)
	}
	return out
}

func paths(st host.Status) (out []string) {
	if st.Reroute != nil {
		for _, p := range st.Reroute.Paths {
			out = append(out, p.Name)
		}
	}
	return out
}

func namespaces() []string {
	names, _ := netns.Names()
	return names
}

// SPDX-License-Identifier: Apache-2.0

// Package filter implements the command weir filter.
package filter

import (
	"cmp"
	"errors"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

func init() {
	cli.Add(cli.Feature{
		Name:     filter.Name,
		Overview: []string{"weir filter list|filters: packets matched by each rule, and when"},
		Commands: func(g *cli.Globals) []*cobra.Command { return []*cobra.Command{filterCommand(g)} },
		Summary: func(w io.Writer, st host.Status, _ bool, now time.Time) {
			if s, ok := host.Part[filter.State](st, filter.Name); ok && len(s.Filters) > 0 {
				printFilters(w, s.Filters, now)
			}
		},
		Names: map[string]func(host.Status) []string{"NAME": func(st host.Status) (out []string) {
			s, _ := host.Part[filter.State](st, filter.Name)
			for _, f := range s.Filters {
				out = append(out, f.Name)
			}
			return out
		}},
	})
}

func filterCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "filter", Short: "Drop, pass and count packets by expressions",
		Long: `Filters drop, pass and count packets by expressions, at any hook of the kernel.
Define them in the section filter of weir.yaml. weir apply installs and changes
them atomically: each packet meets the old rules or the new ones.`,
	}
	c.AddCommand(filterList(g), filterExplain(g), filterTest(g))
	return c
}

func filterList(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "list [NAME]", Short: "List filters, their attachments and the matches of each rule", Args: cobra.MaximumNArgs(1),
		Long: `List filters, their attachments, and the packets, bytes and last match of each
rule. A rule keeps its counters as long as it keeps its name, or its expression if
it has no name.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			st, err := host.Ask[filter.State](cmd.Context(), g.Reader(), filter.Name, feature.StatusQuery, nil)
			if err != nil {
				return err
			}
			if len(args) > 0 {
				if st.Filters = st.Filter(args[0]); len(st.Filters) == 0 {
					return fmt.Errorf("no filter %q: weir filter list shows all", args[0])
				}
			}
			if g.JSON {
				return errors.Join(cli.PrintJSON(cmd, st), st.Err())
			}
			cli.TellFaults(cmd, g, "filter")
			if len(st.Filters) == 0 {
				cli.Note(cmd.OutOrStdout(), "no filters: define some in the section filter of weir.yaml, and run weir apply -f weir.yaml\n")
				return st.Err()
			}
			for i, f := range st.Filters {
				if i > 0 {
					fmt.Fprintln(cmd.OutOrStdout())
				}
				printFilter(cmd.OutOrStdout(), f, time.Now())
			}
			return st.Err()
		},
	}
	cli.JSONFlag(c, g)
	return c
}

// printFilters prints one line for each filter.
func printFilters(w io.Writer, filters []filter.FilterState, now time.Time) {
	type row struct {
		Name    string      `table:"FILTER"`
		Hook    filter.Hook `table:"HOOK"`
		Rules   int         `table:"RULES"`
		Dropped uint64      `table:"DROPPED"`
		Last    string      `table:"LAST DROP"`
		Netns   string      `table:"NETNS"`
	}
	var rows []row
	for _, f := range filters {
		var dropped uint64
		var last time.Time
		for _, r := range append(f.Rules[:len(f.Rules):len(f.Rules)], f.Default) {
			if r.Action == filter.Drop {
				dropped += r.Packets
				if r.Last.After(last) {
					last = r.Last
				}
			}
		}
		rows = append(rows, row{f.Name, f.Hook, len(f.Rules), dropped, since(last, now), f.Netns})
	}
	cli.PrintRows(w, rows, now)
	for _, f := range filters {
		for _, p := range filterProblems(f) {
			cli.Note(w, "! %s: %s\n", f.Name, p)
		}
		for _, p := range f.Attachments {
			if p.Problem == "" && p.Position != nil {
				cli.PrintBeside(w, f.Name, *p.Position)
			}
		}
	}
}

// printFilter prints one filter with its rules.
func printFilter(w io.Writer, f filter.FilterState, now time.Time) {
	cli.Note(w, "%s: hook %s, default %s, in %s\n", f.Name, f.Hook, f.Default.Action, f.Netns)
	for _, p := range f.Attachments {
		if p.Attached && p.Problem == "" {
			cli.Note(w, "  at %s%s\n", p.Name, cli.AtHook(p.Position))
		}
	}
	for _, l := range f.Lists {
		fmt.Fprintf(w, "  list $%s: %s", l.Name, fmt.Count(l.Prefixes, "prefix"))
		if l.MiB > 0 {
			fmt.Fprintf(w, ", %d MiB in tables: %d", l.MiB, l.Tables)
		}
		fmt.Fprintln(w)
	}
	for _, p := range filterProblems(f) {
		cli.Note(w, "  ! %s\n", p)
	}
	printRules(w, f, now)
}

func printRules(w io.Writer, f filter.FilterState, now time.Time) {
	type row struct {
		Name    string        `table:"RULE"`
		Action  filter.Action `table:"ACTION"`
		Packets uint64        `table:"PACKETS"`
		Bytes   uint64        `table:"BYTES,bytes"`
		Last    string        `table:"LAST MATCH"`
		Match   string        `table:"MATCH"`
	}
	var rows []row
	add := func(name string, r filter.RuleState, match string) {
		rows = append(rows, row{name, r.Action, r.Packets, r.Bytes, since(r.Last, now), match})
	}
	for i, r := range f.Rules {
		add(cmp.Or(r.Name, fmt.Sprint(i+1)), r, r.Match)
	}
	add("default", f.Default, "no rule decided")
	if u := f.Unreadable; u.Packets > 0 {
		rows = append(rows, row{"unreadable", "", u.Packets, u.Bytes, since(u.Last, now), "unreadable transport header"})
	}
	cli.PrintIndentedRows(w, rows, now)
}

func filterProblems(f filter.FilterState) []string {
	var out []string
	if f.Problem != "" {
		out = append(out, f.Problem)
	}
	for _, p := range f.Attachments {
		if p.Problem != "" {
			out = append(out, p.Name+": "+p.Problem)
		}
	}
	return out
}

// since formats the age of t as a phrase.
func since(t, now time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return cli.Ago(t, now) + " ago"
}

// SPDX-License-Identifier: Apache-2.0

// Package guard implements the command weir guard.
package guard

import (
	"errors"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

func init() {
	cli.Add(cli.Feature{
		Name:     guard.Name,
		Overview: []string{"weir guard status|limits of floods: what passed, what was refused, and whose it was"},
		Commands: func(g *cli.Globals) []*cobra.Command { return []*cobra.Command{guardCommand(g)} },
		Summary: func(w io.Writer, st host.Status, _ bool, _ time.Time) {
			if s, ok := host.Part[guard.State](st, guard.Name); ok && len(s.Guards) > 0 {
				printGuards(w, s.Guards)
			}
		},
		Names: map[string]func(host.Status) []string{"SERVICE": func(st host.Status) (out []string) {
			s, _ := host.Part[guard.State](st, guard.Name)
			for _, g := range s.Guards {
				out = append(out, g.Service)
			}
			return out
		}},
	})
}

func guardCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "guard", Short: "Limits of UDP floods, and who is being dropped",
		Long: `A guard bounds how many datagrams a service gets, and gives priority to clients by
what they have earned; it finds the pattern of an attack by itself. Guards stand
in the configuration (guard: {limit: 20kpps} in a service); weir apply puts them
in place, and changes their limits while they run.`,
	}
	c.AddCommand(guardStatus(g), guardGrant())
	return c
}

func guardStatus(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "status [SERVICE]", Short: "What guards have let pass and refused, and whom they refuse", Args: cobra.MaximumNArgs(1),
		Long: `Show guards: what has passed and what was refused, by the tier of what a packet's
source has earned, and the patterns of what is being refused (hosts, networks,
source ports, destinations) with their packets per second over the last seconds.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			st, err := host.Ask[guard.State](cmd.Context(), g.Reader(), guard.Name, feature.StatusQuery, nil)
			if err != nil {
				return err
			}
			if len(args) > 0 {
				if st.Guards = st.Service(args[0]); len(st.Guards) == 0 {
					return fmt.Errorf("service %q has no guard: weir guard status shows all", args[0])
				}
			}
			if g.JSON {
				return errors.Join(cli.PrintJSON(cmd, st), st.Err())
			}
			cli.TellFaults(cmd, g, "guard")
			if len(st.Guards) == 0 {
				fmt.Fprintln(cmd.OutOrStdout(), "no guards: a service gets one by guard: {limit: 20kpps} in weir.yaml")
				return st.Err()
			}
			for i, s := range st.Guards {
				if i > 0 {
					fmt.Fprintln(cmd.OutOrStdout())
				}
				printGuard(cmd.OutOrStdout(), s)
			}
			return st.Err()
		},
	}
	cli.JSONFlag(c, g)
	return c
}

// printGuards prints one line for each guard.
func printGuards(w io.Writer, guards []guard.GuardState) {
	type row struct {
		Service string `table:"GUARD"`
		Limit   string `table:"LIMIT"`
		Passed  uint64 `table:"PASSED"`
		Refused uint64 `table:"REFUSED"`
		Now     string `table:"NOW"`
		At      string `table:"AT"`
		Netns   string `table:"NETNS"`
	}
	var rows []row
	for _, g := range guards {
		rows = append(rows, row{g.Service, guardLimit(g), g.Passed, g.Refused, guardNow(g), g.At, g.Netns})
	}
	cli.PrintRows(w, rows, time.Time{})
	for _, g := range guards {
		if g.Problem != "" {
			fmt.Fprintf(w, "%s: %s\n", g.Service, g.Problem)
		}
		cli.PrintBeside(w, g.Service, g.Positions...)
	}
}

func guardLimit(g guard.GuardState) string {
	var out []string
	if g.Limit != 0 {
		out = append(out, g.Limit.String())
	}
	if g.Each != 0 {
		out = append(out, "each "+g.Each.String())
	}
	if g.DryRun {
		out = append(out, "dry run")
	}
	return strings.Join(out, ", ")
}

func guardNow(g guard.GuardState) string {
	switch {
	case g.UnderAttack && g.DryRun:
		return "would refuse"
	case g.UnderAttack:
		return "refusing"
	}
	return "calm"
}

// printGuard prints one guard in detail.
func printGuard(w io.Writer, g guard.GuardState) {
	fmt.Fprintf(w, "%s: %s, limit %s, at %s, in %s\n", g.Service, strings.Join(g.Listen, ", "), guardLimit(g), g.At, g.Netns)
	if g.Problem != "" {
		fmt.Fprintf(w, "  ! %s\n", g.Problem)
	}
	for _, p := range g.Positions {
		fmt.Fprintf(w, "  at %s: %s\n", p.Hook, p)
	}
	now := "calm: nothing was refused in the last few seconds"
	if g.UnderAttack {
		now = guardNow(g) + ": more comes than the limit"
	}
	reserved := "no source has reserved a part of the limit yet"
	if g.ReservationOwners > 0 {
		reserved = fmt.Sprintf("reserved: %.0f packets a second by %s", g.Reserved, fmt.Count(g.ReservationOwners, "source"))
	}
	fmt.Fprintf(w, "  %s; %s\n", now, reserved)
	if g.DryRun {
		fmt.Fprintln(w, "  dry run: what is counted as refused passes")
	}
	printTiers(w, g)
	if len(g.Top) > 0 {
		type row struct {
			Sources string `table:"REFUSED"`
			PPS     string `table:"PPS AT LEAST (20s)"`
		}
		var rows []row
		for _, p := range g.Top {
			rows = append(rows, row{p.String(), fmt.Sprintf("%.0f", p.PPS)})
		}
		cli.PrintIndentedRows(w, rows, time.Time{})
	}
	if len(g.Destinations) > 0 {
		type row struct {
			Address netip.AddrPort `table:"DESTINATION"`
			Passed  uint64         `table:"PASSED"`
			Refused uint64         `table:"REFUSED"`
		}
		var rows []row
		for _, d := range g.Destinations {
			rows = append(rows, row{d.Address, d.Passed, d.Refused})
		}
		cli.PrintIndentedRows(w, rows, time.Time{})
	}
}

// printTiers prints the counts of each tier of sources.
func printTiers(w io.Writer, g guard.GuardState) {
	type row struct {
		Tier    string `table:"TIER"`
		Passed  uint64 `table:"PASSED"`
		Refused uint64 `table:"REFUSED"`
		About   string `table:"OF SOURCES THAT"`
	}
	var rows []row
	for _, tier := range guard.Tiers() {
		rows = append(rows, row{tier.Name, g.Tiers[tier.Name].Passed, g.Tiers[tier.Name].Refused, tier.About})
	}
	if g.Malformed > 0 {
		rows = append(rows, row{"malformed", 0, g.Malformed, "send headers that cannot be read"})
	}
	cli.PrintIndentedRows(w, append(rows, row{"all", g.Passed, g.Refused, ""}), time.Time{})
}

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
		Overview: []string{"weir guard status|limits on floods: packets passed and refused"},
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
		Use: "guard", Short: "Limit UDP floods, and show refused sources",
		Long: `A guard limits the datagrams of a service and prioritizes sources by earned
credit. It detects the pattern of an attack by itself. Define guards in the
configuration (guard: {limit: 20kpps} in a service). weir apply installs them and
changes their limits while they run.`,
	}
	c.AddCommand(guardStatus(g), guardGrant())
	return c
}

func guardStatus(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "status [SERVICE]", Short: "Show passed and refused packets, and refused sources", Args: cobra.MaximumNArgs(1),
		Long: `Show guards: passed and refused packets by the tier of their source, and the
patterns of refused packets (hosts, networks, source ports, destinations) with
their packets per second over the last seconds.`,
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
				cli.Note(cmd.OutOrStdout(), "no guards: add guard: {limit: 20kpps} to a service in weir.yaml\n")
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
		Now     string `table:"STATE"`
		At      string `table:"HOOK"`
		Netns   string `table:"NETNS"`
	}
	var rows []row
	for _, g := range guards {
		rows = append(rows, row{g.Service, guardLimit(g), g.Passed, g.Refused, guardNow(g), g.At, g.Netns})
	}
	cli.PrintRows(w, rows, time.Time{})
	for _, g := range guards {
		if g.Problem != "" {
			cli.Note(w, "! %s: %s\n", g.Service, g.Problem)
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
	case g.Problem != "":
		return "faulty"
	case g.UnderAttack && g.DryRun:
		return "would refuse"
	case g.UnderAttack:
		return "refusing"
	}
	return "calm"
}

// printGuard prints one guard in detail.
func printGuard(w io.Writer, g guard.GuardState) {
	cli.Note(w, "%s: %s, limit %s, at %s, in %s\n", g.Service, strings.Join(g.Listen, ", "), guardLimit(g), g.At, g.Netns)
	if g.Problem != "" {
		cli.Note(w, "  ! %s\n", g.Problem)
	}
	for _, p := range g.Positions {
		cli.Note(w, "  at %s: %s\n", p.Hook, p)
	}
	now := "calm: nothing refused in the last few seconds"
	if g.UnderAttack {
		now = guardNow(g) + ": traffic exceeds the limit"
	}
	reserved := "no source has a reservation yet"
	if g.ReservationOwners > 0 {
		reserved = fmt.Sprintf("reserved: %.0f packets a second by %s", g.Reserved, fmt.Count(g.ReservationOwners, "source"))
	}
	cli.Note(w, "  %s; %s\n", now, reserved)
	if g.DryRun {
		fmt.Fprintln(w, "  dry run: packets counted as refused pass")
	}
	printTiers(w, g)
	if len(g.Top) > 0 {
		type row struct {
			Sources string `table:"REFUSED SOURCES"`
			PPS     string `table:"PPS (20s avg)"`
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
		About   string `table:"SOURCES"`
	}
	var rows []row
	for _, tier := range guard.Tiers() {
		rows = append(rows, row{tier.Name, g.Tiers[tier.Name].Passed, g.Tiers[tier.Name].Refused, tier.About})
	}
	if g.Malformed > 0 {
		rows = append(rows, row{"malformed", 0, g.Malformed, "with unreadable headers"})
	}
	cli.PrintIndentedRows(w, append(rows, row{"all", g.Passed, g.Refused, ""}), time.Time{})
}

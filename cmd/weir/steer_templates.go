// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net/netip"
	"net/url"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

func steerTemplates(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "templates [SERVICE]", Short: "Show templates of flow exporters, and their last replay", Args: cobra.MaximumNArgs(1),
		Long: `Show the templates learnt by weir serve from IPFIX and NetFlow v9 exporters, by
exporter and observation domain (NetFlow v9: source id). Times: last message of
the exporter, last change of its templates, and last replay to a member without
them.`,
		Example: `  weir steer templates
  weir steer templates telemetry --json    # with numbers and lengths`,
		RunE: func(cmd *cobra.Command, args []string) error {
			service := ""
			if len(args) > 0 {
				service = args[0]
			}
			t, err := host.Ask[templates.TemplateState](cmd.Context(), g.Reader(), spec.Name, "templates", url.Values{"service": {service}})
			if err != nil {
				return err
			}
			if g.JSON {
				return cli.PrintJSON(cmd, t)
			}
			printTemplates(cmd.OutOrStdout(), t, time.Now())
			if t.Problem != "" {
				fmt.Fprintln(cmd.ErrOrStderr(), t.Problem)
			}
			return nil
		},
	}
	cli.JSONFlag(c, g)
	return c
}

func printTemplates(w io.Writer, s templates.TemplateState, now time.Time) {
	type row struct {
		Exporter  netip.AddrPort `table:"EXPORTER"`
		Protocol  string         `table:"PROTOCOL"`
		Domain    uint32         `table:"DOMAIN"`
		Slot      int            `table:"SLOT"`
		Templates string         `table:"TEMPLATES"`
		Last      time.Time      `table:"LAST"`
		Learnt    time.Time      `table:"LEARNT"`
		Replayed  time.Time      `table:"REPLAYED"`
		Replays   uint32         `table:"REPLAYS"`
	}
	var rows []row
	for _, e := range s.Exporters {
		options := 0
		for _, v := range e.Templates {
			if v.Options {
				options++
			}
		}
		n := fmt.Sprint(len(e.Templates))
		if options > 0 {
			n += fmt.Sprintf(" (%d options)", options)
		}
		rows = append(rows, row{e.Address, e.Protocol, e.Domain, e.Slot, n, e.Last, e.Learnt, e.Replayed, e.Replays})
	}
	cli.PrintRows(w, rows, now)
	if s.Refused > 0 {
		fmt.Fprintf(w, "refused: %d: unreadable messages, messages over the limits, and exporters evicted for lack of room\n", s.Refused)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature"
	fmt "github.com/weir-project/weir/internal/printable"
)

func explainCommand(g *cli.Globals) *cobra.Command {
	var ns, device string
	c := &cobra.Command{
		Use: "explain {udp | tcp} FROM TO", Short: "Why a packet goes where it goes, step by step", Args: cobra.ExactArgs(3),
		Long: `Say step by step why a datagram, or a connection attempt, goes where it goes:
weir's filters that it meets and the rule of each that decides it, its guards and
whether it would pass at this moment; at a load balancer the service, whether the
flow is known, the backend and the way to it; at a backend the tunnel, and the
quarantine of sessions that move; a connected socket that is there, programs at the
lookup, the service, its policy, the slot and its member, or what an empty slot does;
or the kernel's own choice. Filters and guards are tried on a plain packet (TTL 64,
four bytes, or a SYN), and count and charge nothing. Firewall rules and programs of
others are not asked.`,
		Example: `  weir explain udp 192.0.2.7:2055 10.0.0.1:4739
  weir explain udp 192.0.2.7:2055 10.0.0.1:4739 --interface eth1
  weir explain tcp [2001:db8::7]:40000 [2001:db8::1]:1790 --netns collectors`,
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := feature.ParsePacket(args[0], args[1], args[2])
			if err != nil {
				return cli.Usage(err)
			}
			p.Netns, p.Interface = ns, device
			x, err := g.Host().Explain(cmd.Context(), p)
			if err != nil {
				return err
			}
			if g.JSON {
				return cli.PrintJSON(cmd, x)
			}
			printExplanation(cmd.OutOrStdout(), x)
			return nil
		},
	}
	c.Flags().StringVar(&ns, "netns", "", "network namespace where it arrives: name, path or pid:N (default: this one)")
	c.Flags().StringVar(&device, "interface", "", "interface by which it arrives (default: where the route back to FROM leads)")
	cli.JSONFlag(c, g)
	return c
}

func printExplanation(w io.Writer, x *feature.Explanation) {
	fmt.Fprintf(w, "%s %s → %s, in %s\n", x.Proto, x.From, x.To, x.Netns)
	for i, s := range x.Steps {
		mark := ""
		if s.Warning {
			mark = "! "
		}
		fmt.Fprintf(w, "%2d. %s%s: %s\n", i+1, mark, s.Step, s.Text)
	}
	fmt.Fprintf(w, " → %s\n", x.Result)
}

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
		Use: "explain {udp | tcp} FROM TO", Short: "Explain step by step where a packet goes", Args: cobra.ExactArgs(3),
		Long: `Explain step by step where a datagram or a connection attempt goes:
  - weir's filters on its way, with the deciding rule of each
  - weir's guards, and whether they would pass the packet now
  - at a load balancer: the service, the known flow, the backend and its way
  - at a backend: the tunnel, and the quarantine of moving sessions
  - an existing connected socket, and programs at the socket lookup
  - the service, its policy, slot and member, or the effect of an empty slot
  - or the kernel's own choice

Filters and guards are tried with a plain packet: TTL 64, four bytes or a SYN.
Nothing is counted or charged. Firewall rules and foreign programs are not
evaluated.`,
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
	c.Flags().StringVar(&ns, "netns", "", "network namespace of its arrival: name, path or pid:N (default: this one)")
	c.Flags().StringVar(&device, "interface", "", "interface of its arrival (default: the interface of the route to FROM)")
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

func init() {
	cli.Add(cli.Feature{
		Name:     lb.Name,
		Overview: []string{"weir lb status|load balancers: backends, flows, what became of packets"},
		Commands: func(g *cli.Globals) []*cobra.Command { return []*cobra.Command{lbCommand(g)} },
		Summary: func(w io.Writer, st host.Status, _ bool, _ time.Time) {
			r, _ := host.Part[lb.Report](st, lb.Name)
			for _, s := range r.Balancers {
				printLB(w, s)
			}
		},
	})
}

func lbCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "lb", Short: "Spread services over backends, and let sessions move between them",
		Long: `The load balancer is the section lb of weir.yaml: weir apply records it, and weir serve, or
weir serve --only lb, runs its agent in the network namespace in which it was applied. The
agent tells the data path, a program at tcx of the devices, which backends there are and
whether they are well, and lets sessions move. The data path stays when the agent ends,
with every flow; the next agent goes on with it. docs/LB.md has the section's keys.`,
	}
	c.AddCommand(lbStatus(g), lbOverride(g), lbRemove(g))
	return c
}

// handoffLB rejects the former command, whose file is now a section of weir.yaml.
func handoffLB() *cobra.Command {
	return cli.MovedCommand("front", "lb", "lb")
}

func lbStatus(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Load balancers: their backends, flows, and what became of packets", Args: cobra.NoArgs,
		Long: `Show the load balancers that are pinned, of all network namespaces. Backends' names, weights
and health come from the load balancer's agent; without one, flows by the number of their
backend.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root := kernel.OpenRoot(g.Root)
			all, err := lb.Statuses(cmd.Context(), root)
			if err != nil {
				return err
			}
			unread := lb.Unread(root)
			if g.JSON {
				return errors.Join(cli.PrintJSON(cmd, all), unread)
			}
			if len(all) == 0 && unread == nil {
				fmt.Fprintln(cmd.OutOrStdout(), "no load balancer is here: lb in weir.yaml makes one")
			}
			for i, s := range all {
				if i > 0 {
					fmt.Fprintln(cmd.OutOrStdout())
				}
				printLB(cmd.OutOrStdout(), s)
			}
			return unread
		},
	}
	cli.JSONFlag(c, g)
	return c
}

func printLB(w io.Writer, s lb.Status) {
	n := s.Counts
	fmt.Fprintf(w, "load balancer %s in net:[%s]: %s, %d buffered, %d moving; packets: %d to backends, %d to clients, %d buffered, %d errors passed on\n",
		s.Name, s.Netns, fmt.Count(s.Flows, "flow"), s.Buffered, s.Moving, n.In, n.Out, n.Buffered, n.ICMP)
	fmt.Fprintf(w, "  dropped: %d of backends that do not own the flow, %d resets, %d without a backend, %d of strangers, %d fragments\n",
		n.Mute, n.NoReset, n.NoBackend, n.UnknownSource, n.Fragment)
	if s.Gone {
		fmt.Fprintf(w, "  ! its network namespace is gone, and its data path with it: %s\n", feature.RemedyGone)
	} else if !s.Agent {
		fmt.Fprintln(w, "  ! its agent does not answer: flows go on, and none can move; weir serve runs it")
	}
	for _, d := range s.Devices {
		fmt.Fprintf(w, "  ! device %s: %s: its packets do not come to the load balancer\n", d.Device, d.Reason)
	}
	if s.Starting {
		fmt.Fprintf(w, "  it has begun anew: packets of unknown connections wait for the backends to say which are theirs (%d dropped)\n", n.Awaited)
	}
	if p := s.Partner; p != nil {
		fmt.Fprintf(w, "  partner %s: %s; %s told, %d heard%s\n", p.Name, partnerState(p), fmt.Count(p.Told, "flow"), p.Heard, splitText(p))
	}
	printCertificate(w, s.Certificate)
	printLBBackends(w, s)
}

// printLBBackends prints one line for each backend of a load balancer.
func printLBBackends(w io.Writer, s lb.Status) {
	type row struct {
		Name    string       `table:"BACKEND,dash"`
		Number  move.Backend `table:"NUMBER"`
		Address netip.Addr   `table:"ADDRESS,dash"`
		Where   string       `table:"AT,dash"`
		Weight  int          `table:"WEIGHT"`
		Flows   int          `table:"FLOWS"`
		Waiting string       `table:"WAITING,dash"`
		Agent   string       `table:"AGENT,dash"`
		State   string       `table:""`
	}
	var rows []row
	for _, h := range s.Backends {
		r := row{Name: h.Name, Number: h.Number, Address: h.Address, Where: h.Where, Weight: h.Weight, Flows: h.Flows, Waiting: waiting(h.Loads)}
		if h.Connected {
			r.Agent = "connected" + notHeard(h.Silent)
		}
		if s.Agent && !h.Up {
			r.State = "gets no new flows"
			if h.Reason != "" {
				r.State += ": " + h.Reason
			}
		} else if len(h.Unserved) > 0 {
			r.State = "gets no new flows of " + strings.Join(h.Unserved, ", ") + ": nobody serves them there"
		}
		rows = append(rows, r)
	}
	cli.PrintIndentedRows(w, rows, time.Time{})
}

func partnerState(p *lb.PairStatus) string {
	switch {
	case p.Apart:
		return "! not connected, and its backends' agents are not here, but clients' packets are: both may go on, each by itself"
	case !p.Connected && p.Silent < 0:
		return "! not connected since the agent began"
	case !p.Connected:
		return fmt.Sprintf("! not connected for %.0f s", p.Silent)
	case p.Silent > 0:
		return "! connected" + notHeard(p.Silent)
	case p.Carries && p.There:
		return "connected, and clients' packets come by both"
	case p.There:
		return "connected, and clients' packets come by it"
	}
	return "connected"
}

// notHeard describes the silence of a connected agent; "" if the agent is not silent.
func notHeard(seconds float64) string {
	if seconds == 0 {
		return ""
	}
	return fmt.Sprintf(", but not heard for %.0f s", seconds)
}

func splitText(p *lb.PairStatus) string {
	if p.Seconds == 0 {
		return ""
	}
	return fmt.Sprintf("; split for %.0f s so far, %d packets dropped meanwhile", p.Seconds, p.Dropped)
}

// printCertificate warns of an agent's rejected or expiring certificate.
func printCertificate(w io.Writer, c *peer.Certificate) {
	if c == nil {
		return
	}
	if c.Problem != "" {
		fmt.Fprintf(w, "  ! the agent's new certificate is refused, the one before stays in use: %s\n", c.Problem)
	}
	if left := time.Until(c.NotAfter); left < certificateNear {
		fmt.Fprintf(w, "  ! the agent's certificate expires at %s: replace its files, the agent reads them anew\n", c.NotAfter.UTC().Format(time.RFC3339))
	}
}

// certificateNear is the remaining lifetime at which a certificate is reported.
const certificateNear = 7 * 24 * time.Hour

// waiting formats the queue lengths of services, sorted by service name.
func waiting(loads map[string]uint32) string {
	var out []string
	for _, service := range slices.Sorted(maps.Keys(loads)) {
		out = append(out, fmt.Sprint(service, " ", loads[service]))
	}
	return strings.Join(out, ", ")
}

func lbOverride(g *cli.Globals) *cobra.Command {
	var name string
	c := &cobra.Command{
		Use: "override SERVICE CLIENT [BACKEND]", Short: "Give a client to a backend, whatever the hash says", Args: cobra.RangeArgs(2, 3),
		Long: `Give a client's flows to a backend. CLIENT is an address where the service goes by
source, else an address and a port. A source changes its backend at once, and its
connections are reset there; a connection that is known by itself is not torn from its
backend. Without BACKEND the override ends.`,
		Example: `  weir lb override telemetry 192.0.2.7 b
  weir lb override telemetry 192.0.2.7`,
		RunE: func(cmd *cobra.Command, args []string) error {
			backend := ""
			if len(args) > 2 {
				backend = args[2]
			}
			r := kernel.OpenRoot(g.Root)
			if name == "" {
				var err error
				if name, err = lb.OnlyName(r); err != nil {
					return err
				}
			}
			return lb.Override(cmd.Context(), r, name, args[0], args[1], backend)
		},
	}
	c.Flags().StringVar(&name, "name", "", "of the load balancer, where there are several")
	return c
}

func lbRemove(g *cli.Globals) *cobra.Command {
	var allow outageFlag
	c := &cobra.Command{
		Use: "remove [NAME]", Short: "End a load balancer of this network namespace, and forget its flows", Args: cobra.MaximumNArgs(1),
		Long: `End the data path: packets go where the kernel's routes lead them. Its agent ends within a second.
A load balancer that spreads traffic is removed by --allow-outage alone. weir remove lb does
so in all network namespaces.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) > 0 {
				name = args[0]
			}
			return g.Host().RemovePart(cmd.Context(), lb.Name, bool(allow), func(ctx context.Context, r *kernel.Root) (feature.Plan, error) {
				return lb.PlanRemoveHere(ctx, r, name)
			})
		},
	}
	allow.add(c)
	return c
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
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
	"github.com/weir-project/weir/feature/handoff/lb/report"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

func init() {
	cli.Add(cli.Feature{
		Name:     lb.Name,
		Overview: []string{"weir lb status|load balancers: backends, flows and packet counters"},
		Commands: func(g *cli.Globals) []*cobra.Command { return []*cobra.Command{lbCommand(g)} },
		Summary: func(w io.Writer, st host.Status, _ bool, _ time.Time) {
			r, _ := host.Part[lb.Report](st, lb.Name)
			for _, s := range r.Balancers {
				printLB(w, s)
			}
		},
		Names:   map[string]func(host.Status) []string{"NAME": balancers},
		Choices: map[string]cli.Choice{"SERVICE": balancedServices, "BACKEND": balancedBackends},
	})
}

// balancedSpec returns the applied section lb, nil if there is none or if this user may not read it.
func balancedSpec(g *cli.Globals) *lb.Config {
	ctx, cancel := context.WithTimeout(context.Background(), completing)
	defer cancel()
	st, err := lb.Feature{}.State(ctx, g.Host().Root)
	if err != nil {
		return nil
	}
	return st.Spec
}

func balancedServices(_ *cobra.Command, g *cli.Globals, _ []string) []string {
	spec := balancedSpec(g)
	if spec == nil {
		return nil
	}
	return slices.Sorted(maps.Keys(spec.Services))
}

// balancedBackends completes the backends of the file and of the agents.
func balancedBackends(_ *cobra.Command, g *cli.Globals, _ []string) []string {
	out := completed(g, func(st host.Status) (out []string) {
		r, _ := host.Part[lb.Report](st, lb.Name)
		for _, s := range r.Balancers {
			for _, b := range s.Backends {
				if b.Name != "" {
					out = append(out, b.Name)
				}
			}
		}
		return out
	})
	if spec := balancedSpec(g); spec != nil {
		out = slices.AppendSeq(out, maps.Keys(spec.Backends))
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func balancers(st host.Status) (out []string) {
	r, _ := host.Part[lb.Report](st, lb.Name)
	for _, s := range r.Balancers {
		out = append(out, s.Name)
	}
	return out
}

func lbCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "lb", Short: "Spread services over backends, and move sessions between them",
		Long: `The load balancer is the section lb of weir.yaml. weir apply records it. weir
serve, or weir serve --only lb, runs its agent in the network namespace of that
apply. The data path is a program at tcx of the devices. The agent configures its
backends, reports their health to it, and coordinates moves of sessions. The data
path survives the agent with all flows, and the next agent continues. docs/LB.md
describes the keys.`,
	}
	c.AddCommand(lbStatus(g), lbOverride(g), lbRemove(g))
	return c
}

// handoffLB rejects the former command: its file is now a section of weir.yaml.
func handoffLB() *cobra.Command {
	return cli.MovedCommand("front", "lb", "lb")
}

func lbStatus(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Show load balancers, their backends, flows and packet counters", Args: cobra.NoArgs,
		Long: `Show the pinned load balancers of all network namespaces. Names, weights and
health of backends come from the load balancer's agent. Without an agent, flows
are shown by backend number.`,
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
				cli.Note(cmd.OutOrStdout(), "no load balancer: define one in the section lb of weir.yaml\n")
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
	cli.Note(w, "load balancer %s in net:[%s]: %s, %d buffered, %d moving\n", s.Name, s.Netns, fmt.Count(s.Flows, "flow"), s.Buffered, s.Moving)
	if s.Gone {
		cli.Note(w, "  ! its network namespace is gone, and its data path with it: %s\n", feature.RemedyGone)
	} else if s.Problem != "" {
		cli.Note(w, "  ! wrong answer at its agent's socket %s: %s\n", s.Problem, report.RemedyProblem)
	} else if !s.Agent {
		cli.Note(w, "  ! its agent does not answer: flows continue, but none can move, and no backend is checked; run weir serve\n")
	}
	for _, d := range s.Devices {
		cli.Note(w, "  ! device %s: %s: its packets do not reach the load balancer\n", d.Device, d.Reason)
	}
	if s.Starting {
		cli.Note(w, "  starting: packets of unknown connections wait until the backends claim them (%d dropped)\n", n.Awaited)
	}
	if p := s.Partner; p != nil {
		cli.Note(w, "  partner %s: %s; %s sent, %d received%s\n", p.Name, partnerState(p), fmt.Count(p.Told, "flow"), p.Heard, splitText(p))
	}
	printCertificate(w, s.Certificate)
	printLBBackends(w, s)
	cli.Note(w, "  packets: %d to backends, %d to clients, %d buffered, %d errors passed on\n", n.In, n.Out, n.Buffered, n.ICMP)
	cli.Note(w, "  dropped: %d from a backend not owning the flow, %d resets,\n           %d without a backend, %d from unknown sources, %d fragments\n",
		n.Mute, n.NoReset, n.NoBackend, n.UnknownSource, n.Fragment)
}

// printLBBackends prints one line for each backend of a load balancer, and below them why backends get no new flows.
func printLBBackends(w io.Writer, s lb.Status) {
	type row struct {
		Name    string       `table:"BACKEND,dash"`
		Number  move.Backend `table:"NUMBER"`
		Address netip.Addr   `table:"ADDRESS,dash"`
		Where   string       `table:"VIA,dash"`
		Weight  string       `table:"WEIGHT,dash"` // only the agent knows it
		Flows   int          `table:"FLOWS"`
		Waiting string       `table:"QUEUED,dash"`
		Agent   string       `table:"AGENT,dash"`
	}
	var rows []row
	var problems []string
	for _, h := range s.Backends {
		r := row{Name: h.Name, Number: h.Number, Address: h.Address, Where: h.Where, Flows: h.Flows, Waiting: waiting(h.Loads)}
		if s.Agent {
			r.Weight = fmt.Sprint(h.Weight)
		}
		if h.Connected {
			r.Agent = "connected" + notHeard(h.Silent)
		}
		rows = append(rows, r)
		name := cmp.Or(h.Name, fmt.Sprint(h.Number))
		if s.Agent && !h.Up {
			problems = append(problems, strings.TrimSuffix(fmt.Sprintf("backend %s gets no new flows: %s", name, h.Reason), ": "))
		} else if len(h.Unserved) > 0 {
			problems = append(problems, fmt.Sprintf("backend %s gets no new flows of %s: no process serves them there", name, strings.Join(h.Unserved, ", ")))
		}
	}
	if len(rows) > 0 {
		cli.PrintIndentedRows(w, rows, time.Time{})
	}
	for _, p := range problems {
		fmt.Fprintln(w, "  !", p)
	}
	for _, k := range s.Kept {
		cli.Note(w, "  number %d is kept for absent backend %s, free in %s\n", k.Number, k.Name, (time.Duration(k.Free) * time.Second).String())
	}
}

func partnerState(p *lb.PairStatus) string {
	switch {
	case p.Apart:
		return "! not connected, and its backends' agents are missing here while clients' packets arrive: both may be active at once"
	case !p.Connected && p.Silent < 0:
		return "! not connected since the agent's start"
	case !p.Connected:
		return fmt.Sprintf("! not connected for %.0f s", p.Silent)
	case p.Silent > 0:
		return "! connected" + notHeard(p.Silent)
	case p.Carries && p.There:
		return "connected, clients' packets arrive at both"
	case p.There:
		return "connected, clients' packets arrive there"
	}
	return "connected"
}

// notHeard describes the silence of a connected agent; "" if the agent is not silent.
func notHeard(seconds float64) string {
	if seconds == 0 {
		return ""
	}
	return fmt.Sprintf(", but silent for %.0f s", seconds)
}

func splitText(p *lb.PairStatus) string {
	if p.Seconds == 0 {
		return ""
	}
	return fmt.Sprintf("; split for %.0f s so far, %s dropped meanwhile", p.Seconds, fmt.Count(p.Dropped, "packet"))
}

// printCertificate warns of an agent's rejected or expiring certificate.
func printCertificate(w io.Writer, c *peer.Certificate) {
	if c == nil {
		return
	}
	if c.Problem != "" {
		cli.Note(w, "  ! the agent's new certificate is rejected, the previous one stays in use: %s\n", c.Problem)
	}
	if left := time.Until(c.NotAfter); left < certificateNear {
		cli.Note(w, "  ! the agent's certificate expires at %s: replace its files; the agent reloads them\n", c.NotAfter.UTC().Format(time.RFC3339))
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
		Use: "override SERVICE CLIENT [BACKEND]", Short: "Send a client to a given backend in place of the hash's choice", Args: cobra.RangeArgs(2, 3),
		Long: `Send a client's flows to a backend. CLIENT is an address if the service balances
by source, else an address and a port. A source changes its backend at once, and
its connections are reset there. A connection with its own flow entry stays at its
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
	c.Flags().StringVar(&name, "name", "", "name of the load balancer (required if there are several)")
	return c
}

func lbRemove(g *cli.Globals) *cobra.Command {
	var allow outageFlag
	c := &cobra.Command{
		Use: "remove [NAME]", Short: "Remove a load balancer of this network namespace and its flows", Args: cobra.MaximumNArgs(1),
		Long: `Remove the data path and its flows: packets then follow the kernel's routes. The
agent ends within 1 s. A load balancer with traffic is removed only with
--allow-outage. weir remove lb removes load balancers in all network namespaces.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) > 0 {
				name = args[0]
			}
			return printRemoved(cmd, "load balancer")(g.Host().RemovePart(cmd.Context(), lb.Name, bool(allow), func(ctx context.Context, r *kernel.Root) (feature.Plan, error) {
				return lb.PlanRemoveHere(ctx, r, name)
			}))
		},
	}
	allow.add(c)
	return c
}

// printRemoved prints the objects removed by RemovePart. kind names the missing object if there is none.
func printRemoved(cmd *cobra.Command, kind string) func([]string, error) error {
	return func(removed []string, err error) error {
		for _, object := range removed {
			fmt.Fprintln(cmd.OutOrStdout(), "removed", object)
		}
		if err == nil && len(removed) == 0 {
			fmt.Fprintf(cmd.OutOrStdout(), "nothing to remove: no %s in this network namespace\n", kind)
		}
		return err
	}
}

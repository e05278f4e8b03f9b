// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

func init() {
	cli.Add(cli.Feature{
		Name:     backend.Name,
		Commands: func(*cli.Globals) []*cobra.Command { return nil }, // its commands are below weir handoff
		Summary: func(w io.Writer, st host.Status, _ bool, _ time.Time) {
			if r, ok := host.Part[backend.Report](st, backend.Name); ok && r.Agent != nil {
				printServer(w, *r.Agent)
			} else if ok && r.Spec != nil {
				fmt.Fprintf(w, "backend %s: ! its agent does not answer: no session can move; weir serve runs it\n", r.Spec.Name)
			}
		},
	})
}

func backendCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "backend", Short: "This backend of a load balancer: sessions that move to other backends",
		Long: `A backend of a load balancer is the section handoff.backend of weir.yaml: weir apply records it,
and weir serve, or weir serve --only backend, runs its agent in the network namespace in
which it was applied. The agent needs a session keeper on this host, and members that move
their sessions. To them and to the keeper the other backends are members: weir handoff send
SESSION @b moves a session to backend b, and so does a transfer to @b. weir handoff drain
empties this backend.

A quarantine at tcx of the devices keeps packets from a session that is on its way; it stays
when the agent ends, and the next agent goes on. docs/BACKENDS.md has the section's
keys and what is promised.`,
	}
	c.AddCommand(serverStatus(g), serverRemove(g))
	return c
}

// handoffServer rejects the former command, whose file is now a section of weir.yaml.
func handoffServer() *cobra.Command { return cli.MovedCommand("server", "handoff.backend", "backend") }

func serverStatus(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Sessions that have moved from and to this backend", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := backend.StatusHere(cmd.Context())
			if err != nil {
				return err
			}
			if g.JSON {
				return cli.PrintJSON(cmd, s)
			}
			printServer(cmd.OutOrStdout(), s)
			return nil
		},
	}
	cli.JSONFlag(c, g)
	return c
}

func printServer(w io.Writer, s backend.Status) {
	draining := ""
	if s.Draining {
		draining = "; it is being drained, and gets no new flows"
	}
	fmt.Fprintf(w, "backend %s: sessions: %d have left, %d have come, %d came back, %d on their way%s\n", s.Backend, s.Out, s.In, s.Returned, s.Sending+s.Receiving, draining)
	if s.Out > 0 {
		fmt.Fprintf(w, "  a move takes %s, of a hundred the slowest %s, at most %s; %s on average stopped; %d bytes a session\n",
			short(s.Transfer.P50), short(s.Transfer.P99), short(s.Transfer.Max), short(s.Stopped.Sum/time.Duration(s.Stopped.Count)), s.Bytes/s.Out)
	}
	if len(s.Unserved) > 0 {
		fmt.Fprintf(w, "  ! nobody here serves %s (no process listens, or the address is not local): new flows go to other backends\n", strings.Join(s.Unserved, ", "))
	}
	for _, what := range slices.Sorted(maps.Keys(s.Rejected)) {
		fmt.Fprintf(w, "  ! %s: refused %d times; the agent's log says why\n", what, s.Rejected[what])
	}
	for i, b := range s.Blocked {
		if i == maxStuck {
			fmt.Fprintf(w, "  ! and %d more: --json has all\n", len(s.Blocked)-i)
			break
		}
		fmt.Fprintf(w, "  ! in the way of the drain: %s\n", b)
	}
	for i, v := range s.Stuck {
		if i == maxStuck {
			fmt.Fprintf(w, "  ! and %d more: --json has all\n", len(s.Stuck)-i)
			break
		}
		fmt.Fprintf(w, "  ! %s of %s stands still for %s: %s\n", v.Client, v.Service, v.For.Round(time.Second), v.Reason)
	}
	printCertificate(w, s.Certificate)
	if !s.Keeper {
		fmt.Fprintln(w, "  ! no keeper answers: no session can move (weir serve, or weir handoff keep)")
	}
	if s.LBRejects != "" {
		fmt.Fprintf(w, "  ! the load balancer refuses this backend: %s\n", s.LBRejects)
	} else if !s.LB {
		fmt.Fprintln(w, "  ! the load balancer's agent is not connected: no session can move")
	} else if d := s.Silent[""]; d > 0 {
		fmt.Fprintf(w, "  ! the load balancer's agent is connected%s\n", notHeard(d))
	}
	if s.TimeoutError != "" {
		fmt.Fprintf(w, "  ! %s\n", s.TimeoutError)
	}
	type row struct {
		Name  string `table:"BACKEND"`
		Agent string `table:"AGENT"`
	}
	var rows []row
	for _, name := range slices.Sorted(maps.Keys(s.Peers)) {
		state := "not connected"
		if s.Peers[name] {
			state = "connected" + notHeard(s.Silent[name])
		}
		rows = append(rows, row{name, state})
	}
	cli.PrintIndentedRows(w, rows, time.Time{})
}

// maxStuck bounds the printed sessions.
const maxStuck = 10

// short rounds a duration for printing.
func short(d time.Duration) string {
	if d < 10*time.Millisecond {
		return d.Round(10 * time.Microsecond).String()
	}
	return d.Round(time.Millisecond).String()
}

func serverRemove(g *cli.Globals) *cobra.Command {
	var allow outageFlag
	c := &cobra.Command{
		Use: "remove", Short: "Take the backend of this network namespace away, with its quarantine", Args: cobra.NoArgs,
		Long: `Take away what weir apply recorded of this backend, and the quarantine that its agent has put
at the devices. The agent ends within a second; sessions that are on their way then may end,
and the load balancer gives the backend no new flows. Nothing is removed while that would be
so, unless --allow-outage is given: empty the backend first, by weir handoff drain.
weir remove backend does so in all network namespaces.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return g.Host().RemovePart(cmd.Context(), backend.Name, bool(allow), backend.PlanRemoveHere)
		},
	}
	allow.add(c)
	return c
}

// blockedTold prints the sessions blocking a drain. It prints each reason of a session once.
type blockedTold struct {
	w   io.Writer
	why map[string]string // by session
}

func (t blockedTold) tell(all []backend.Blocked) {
	for _, b := range all {
		was, known := t.why[b.Session]
		if was == b.Reason {
			continue
		}
		t.why[b.Session] = b.Reason
		switch n := len(t.why); {
		case n <= maxStuck:
			fmt.Fprintf(t.w, "  ! in the way: %s\n", b)
		case n == maxStuck+1 && !known:
			fmt.Fprintln(t.w, "  ! and more: weir handoff backend status --json has all")
		}
	}
}

// staying describes the connections that a drain cannot move.
func staying(d backend.Drained) string {
	var all []string
	if d.Immobile > 0 {
		all = append(all, fmt.Sprintf("%d sessions whose members move none", d.Immobile))
	}
	if d.Others > 0 {
		all = append(all, fmt.Sprintf("%d connections of programs that hand over nothing", d.Others))
	}
	for _, name := range slices.Sorted(maps.Keys(d.Unnamed)) {
		all = append(all, fmt.Sprintf("of these %d of members of %q, which is no service of the load balancer's: they must join by its name", d.Unnamed[name], name))
	}
	return strings.Join(all, ", ")
}

func handoffDrain() *cobra.Command {
	var how backend.Draining
	var patience time.Duration
	c := &cobra.Command{
		Use: "drain [SERVER]", Short: "Empty this backend: its sessions move to the others", Args: cobra.MaximumNArgs(1),
		Long: `Have the load balancer give this backend no new flows, and move every session of members
that move theirs to the other backends. It ends when none is left, and names the sessions
that are in the way meanwhile, with their addresses, their member and the reason.
Connections that cannot move, such as downloads from nginx, are counted in the end;
--wait waits for them as well. --undo has new flows come again. SERVER, if it is given,
must be this backend's name: it guards against the wrong terminal.`,
		Example: `  weir handoff drain s2 --wait && systemctl poweroff
  weir handoff drain --undo`,
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) > 0 {
				name = args[0]
			}
			ctx := cmd.Context()
			if patience < 0 {
				return cli.Usage(fmt.Errorf("--timeout %s: take a time to wait, or 0 to wait without an end", patience))
			}
			if patience > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, patience)
				defer cancel()
			}
			var last backend.Drained
			told := blockedTold{w: cmd.ErrOrStderr(), why: map[string]string{}}
			err := backend.DrainHere(ctx, name, how, func(d backend.Drained) {
				if d.Left != last.Left || d.Reason != last.Reason {
					fmt.Fprintln(cmd.ErrOrStderr(), strings.TrimSuffix(fmt.Sprintf("%s: %d sessions left: %s", d.Backend, d.Left, d.Reason), ": "))
				}
				if stays := staying(d); how.All && d.Left == 0 && stays != staying(last) && stays != "" {
					fmt.Fprintf(cmd.ErrOrStderr(), "%s: waits for the end of %s\n", d.Backend, stays)
				}
				told.tell(d.Blocked)
				last = d
			})
			if err != nil && patience > 0 && ctx.Err() != nil {
				err = fmt.Errorf("--timeout %s is over", patience)
			}
			switch {
			case err != nil && last.Left > 0:
				return fmt.Errorf("%d sessions are left, %d of them in the way; weir handoff backend status names them, and new flows stay away until --undo: %w",
					last.Left, len(last.Blocked), err)
			case err != nil && how.All && staying(last) != "":
				return fmt.Errorf("%s are left, and new flows stay away until --undo: %w", staying(last), err)
			case err != nil:
				return err
			case how.Undo:
				fmt.Fprintln(cmd.OutOrStdout(), "new flows come again")
			case staying(last) != "":
				fmt.Fprintf(cmd.OutOrStdout(), "empty but for %s: they end in their own time\n", staying(last))
			default:
				fmt.Fprintln(cmd.OutOrStdout(), "empty")
			}
			return nil
		},
	}
	c.Flags().BoolVar(&how.Undo, "undo", false, "have new flows come again")
	c.Flags().BoolVar(&how.All, "wait", false, "wait as well for the end of connections that cannot move")
	c.Flags().DurationVar(&patience, "timeout", 0, "give up after so long; 0: never")
	return c
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
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
				cli.Note(w, "backend %s: ! its agent does not answer: no session can move; run weir serve\n", r.Spec.Name)
			}
		},
	})
}

func backendCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "backend", Short: "Show and remove this backend of a load balancer",
		Long: `A backend of a load balancer is the section handoff.backend of weir.yaml. weir
apply records it. weir serve, or weir serve --only backend, runs its agent in the
network namespace of that apply. The agent needs a session keeper on this host,
and members that hand over their sessions. The other backends appear as members
@NAME: weir handoff send SESSION @b, or a transfer to @b, moves a session to
backend b. weir handoff drain empties this backend.

A quarantine at tcx of the devices blocks packets of moving sessions. It stays
when the agent ends, and the next agent continues. docs/BACKENDS.md describes the
keys and the guarantees.`,
	}
	c.AddCommand(serverStatus(g), serverRemove(g))
	return c
}

// handoffServer rejects the former command: its file is now a section of weir.yaml.
func handoffServer() *cobra.Command { return cli.MovedCommand("server", "handoff.backend", "backend") }

func serverStatus(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Show sessions moved from and to this backend", Args: cobra.NoArgs,
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
		draining = "; draining, no new flows"
	}
	cli.Note(w, "backend %s: sessions: %d sent, %d received, %d returned, %d in transfer%s\n", s.Backend, s.Out, s.In, s.Returned, s.Sending+s.Receiving, draining)
	if s.Out > 0 {
		cli.Note(w, "  a move takes %s (median), %s (p99), %s (max); stopped for %s on average; %d bytes a session\n",
			short(s.Transfer.P50), short(s.Transfer.P99), short(s.Transfer.Max), short(s.Stopped.Sum/time.Duration(s.Stopped.Count)), s.Bytes/s.Out)
	}
	if len(s.Unserved) > 0 {
		cli.Note(w, "  ! no process serves %s here (no listener, or the address is not local): new flows go to other backends\n", strings.Join(s.Unserved, ", "))
	}
	for _, what := range slices.Sorted(maps.Keys(s.Rejected)) {
		cli.Note(w, "  ! %s: rejected %s; see the agent's log\n", what, fmt.Count(s.Rejected[what], "time"))
	}
	for i, b := range s.Blocked {
		if i == maxStuck {
			cli.Note(w, "  ! and %d more: --json has all\n", len(s.Blocked)-i)
			break
		}
		cli.Note(w, "  ! blocks the drain: %s\n", b)
	}
	for i, v := range s.Stuck {
		if i == maxStuck {
			cli.Note(w, "  ! and %d more: --json has all\n", len(s.Stuck)-i)
			break
		}
		cli.Note(w, "  ! %s of %s has been stuck for %s: %s\n", v.Client, v.Service, v.For.Round(time.Second), v.Reason)
	}
	printCertificate(w, s.Certificate)
	if !s.Keeper {
		cli.Note(w, "  ! the session keeper does not answer: no session can move; run weir serve, or weir handoff keep\n")
	}
	if s.LBRejects != "" {
		cli.Note(w, "  ! the load balancer rejects this backend: %s\n", s.LBRejects)
	} else if !s.LB {
		cli.Note(w, "  ! the load balancer's agent is not connected: no session can move\n")
	} else if d := s.Silent[""]; d > 0 {
		cli.Note(w, "  ! the load balancer's agent is connected%s\n", notHeard(d))
	}
	if s.TimeoutError != "" {
		cli.Note(w, "  ! %s\n", s.TimeoutError)
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
	if len(rows) > 0 {
		cli.PrintIndentedRows(w, rows, time.Time{})
	}
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
		Use: "remove", Short: "Remove the backend of this network namespace and its quarantine", Args: cobra.NoArgs,
		Long: `Remove the recorded backend of this network namespace, and its agent's quarantine
at the devices. The agent ends within 1 s. Moving sessions may then end, and the
load balancer sends the backend no new flows. The command fails if that would take
traffic away, unless --allow-outage is given: first empty the backend with weir
handoff drain. weir remove backend removes it in all network namespaces.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printRemoved(cmd, "backend")(g.Host().RemovePart(cmd.Context(), backend.Name, bool(allow), backend.PlanRemoveHere))
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
			cli.Note(t.w, "  ! blocks the drain: %s\n", b)
		case n == maxStuck+1 && !known:
			cli.Note(t.w, "  ! and more: weir handoff backend status --json has all\n")
		}
	}
}

// staying describes the connections that a drain cannot move.
func staying(d backend.Drained) string {
	var all []string
	if d.Immobile > 0 {
		all = append(all, fmt.Sprintf("%s of members without handover", fmt.Count(d.Immobile, "session")))
	}
	if d.Others > 0 {
		all = append(all, fmt.Sprintf("%s of programs without handover", fmt.Count(d.Others, "connection")))
	}
	for _, name := range slices.Sorted(maps.Keys(d.Unnamed)) {
		all = append(all, fmt.Sprintf("of these %d of members of %q, which is not a service of the load balancer: join under its service name", d.Unnamed[name], name))
	}
	return strings.Join(all, ", ")
}

func handoffDrain() *cobra.Command {
	var how backend.Draining
	var patience time.Duration
	c := &cobra.Command{
		Use: "drain [BACKEND]", Short: "Empty this backend by moving its sessions to the others", Args: cobra.MaximumNArgs(1),
		Long: `Stop new flows to this backend, and move all movable sessions to the other
backends. The command ends when none is left. Meanwhile it prints blocked sessions
with their addresses, member and reason. Connections that cannot move, such as
downloads from nginx, are counted at the end; --wait waits for them too. --undo
allows new flows again. The command fails if no other backend serves one of the
services, unless --allow-outage is given. BACKEND, if given, must be this
backend's name: it guards against the wrong terminal.`,
		Example: `  weir handoff drain s2 --wait && systemctl poweroff
  weir handoff drain --undo`,
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) > 0 {
				name = args[0]
			}
			ctx := cmd.Context()
			if patience < 0 {
				return cli.Usage(fmt.Errorf("--timeout %s: want 0 (no limit) or more", patience))
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
					fmt.Fprintln(cmd.ErrOrStderr(), strings.TrimSuffix(fmt.Sprintf("%s: %s left: %s", d.Backend, fmt.Count(d.Left, "session"), d.Reason), ": "))
				}
				if stays := staying(d); how.All && d.Left == 0 && stays != staying(last) && stays != "" {
					fmt.Fprintf(cmd.ErrOrStderr(), "%s: waiting for the end of %s\n", d.Backend, stays)
				}
				told.tell(d.Blocked)
				last = d
			})
			switch {
			case err != nil && cmd.Context().Err() != nil:
				err = errors.New("interrupted")
			case err != nil && patience > 0 && ctx.Err() != nil:
				err = fmt.Errorf("timeout after %s", patience)
			}
			switch {
			case err != nil && last.Left > 0:
				return fmt.Errorf("%s left, %d of them blocked; weir handoff backend status names them, and new flows stay stopped until --undo: %w",
					fmt.Count(last.Left, "session"), len(last.Blocked), err)
			case err != nil && how.All && staying(last) != "":
				return fmt.Errorf("%s left, and new flows stay stopped until --undo: %w", staying(last), err)
			case err != nil && ctx.Err() != nil && !how.Undo:
				return fmt.Errorf("%w: new flows may stay stopped until --undo", err)
			case err != nil:
				return err
			case how.Undo:
				fmt.Fprintln(cmd.OutOrStdout(), "new flows are allowed again")
			case staying(last) != "":
				fmt.Fprintf(cmd.OutOrStdout(), "empty except for %s: they end by themselves\n", staying(last))
			default:
				fmt.Fprintln(cmd.OutOrStdout(), "empty")
			}
			return nil
		},
	}
	c.Flags().BoolVar(&how.Undo, "undo", false, "allow new flows again")
	(*outageFlag)(&how.AllowOutage).add(c)
	c.Flags().BoolVar(&how.All, "wait", false, "wait too for the end of connections that cannot move")
	c.Flags().DurationVar(&patience, "timeout", 0, "give up after this time; 0: never")
	return c
}

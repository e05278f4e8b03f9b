// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-project/weir/feature/handoff/server"
	"github.com/weir-project/weir/internal/netns"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

func handoffServer(g *globals) *cobra.Command {
	var file string
	c := &cobra.Command{
		Use: "server -f FILE", Short: "Move sessions to other servers behind the same front end, and take theirs", Args: cobra.NoArgs,
		Long: `Run the agent of a server behind a front end (weir handoff front). It needs a keeper on
this server, and members that move their sessions. To them and to the keeper the other
servers are members: weir handoff send SESSION @b moves a session to server b, and so
does a transfer to @b. weir handoff drain empties this server.

A gate at tcx of the devices keeps packets from a session that is on its way; it stays
when the agent ends, and the next agent goes on. docs/HANDOFF-SERVERS.md has the file's
keys and what is promised.`,
		Example: `  weir handoff server -f server.yaml
  weir handoff server status`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				return usageError{errors.New("name the server's file: weir handoff server -f server.yaml")}
			}
			c, err := server.LoadConfig(file)
			if err != nil {
				return err
			}
			log := newLog(os.Stderr)
			ignoreHangup(cmd.Context(), log, "restart weir handoff server to read its file again; what it holds stays")
			return server.Start(cmd.Context(), kernel.OpenRoot(g.root), c, log)
		},
	}
	c.Flags().StringVarP(&file, "file", "f", "", "the server's file")
	c.AddCommand(serverStatus(g), serverRemove(g))
	return c
}

func serverStatus(g *globals) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Sessions that have moved from and to this server", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := server.StatusHere(cmd.Context())
			if err != nil {
				return err
			}
			if g.json {
				return printJSON(cmd, s)
			}
			printServer(cmd.OutOrStdout(), s)
			return nil
		},
	}
	jsonFlag(c, g)
	return c
}

func printServer(w io.Writer, s server.Status) {
	draining := ""
	if s.Draining {
		draining = "; it is being drained, and gets no new flows"
	}
	fmt.Fprintf(w, "%s: %d sessions have left, %d have come, %d came back, %d on their way%s\n", s.Server, s.Out, s.In, s.Back, s.Leaving+s.Arriving, draining)
	if s.Out > 0 {
		fmt.Fprintf(w, "  a move takes %s, of a hundred the slowest %s, at most %s; %s on average stopped; %d bytes a session\n",
			short(s.Transfer.P50), short(s.Transfer.P99), short(s.Transfer.Max), short(s.Stopped.Sum/time.Duration(s.Stopped.Count)), s.Bytes/s.Out)
	}
	if len(s.Unserved) > 0 {
		fmt.Fprintf(w, "  ! nobody here serves %s: new flows go to other servers\n", strings.Join(s.Unserved, ", "))
	}
	for _, what := range slices.Sorted(maps.Keys(s.Refused)) {
		fmt.Fprintf(w, "  ! %s: refused %d times; the agent's log says why\n", what, s.Refused[what])
	}
	for i, b := range s.Blocked {
		if i == mostStuck {
			fmt.Fprintf(w, "  ! and %d more: --json has all\n", len(s.Blocked)-i)
			break
		}
		fmt.Fprintf(w, "  ! in the way of the drain: %s\n", b)
	}
	for i, v := range s.Stuck {
		if i == mostStuck {
			fmt.Fprintf(w, "  ! and %d more: --json has all\n", len(s.Stuck)-i)
			break
		}
		fmt.Fprintf(w, "  ! %s of %s stands still for %s: %s\n", v.Client, v.Service, v.For.Round(time.Second), v.Why)
	}
	printCertificate(w, s.Certificate)
	if !s.Keeper {
		fmt.Fprintln(w, "  ! no keeper answers: no session can move (weir serve, or weir handoff keep)")
	}
	if s.Unwanted != "" {
		fmt.Fprintf(w, "  ! the front end refuses this server: %s\n", s.Unwanted)
	} else if !s.Front {
		fmt.Fprintln(w, "  ! the front end's agent is not connected: no session can move")
	} else if d := s.Silent[""]; d > 0 {
		fmt.Fprintf(w, "  ! the front end's agent is connected%s\n", notHeard(d))
	}
	if s.Patience != "" {
		fmt.Fprintf(w, "  ! %s\n", s.Patience)
	}
	t := newTable(w, "  SERVER", "AGENT")
	for _, name := range slices.Sorted(maps.Keys(s.Peers)) {
		state := "not connected"
		if s.Peers[name] {
			state = "connected" + notHeard(s.Silent[name])
		}
		t.row("  "+name, state)
	}
	t.flush()
}

// mostStuck are shown.
const mostStuck = 10

// short is a duration as a person reads it.
func short(d time.Duration) string {
	if d < 10*time.Millisecond {
		return d.Round(10 * time.Microsecond).String()
	}
	return d.Round(time.Millisecond).String()
}

func serverRemove(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "remove", Short: "Take the gate of this network namespace away", Args: cobra.NoArgs,
		Long: `Take the gate away that weir handoff server has put at the devices. End the agent first:
sessions that are on their way then may end.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ns, err := netns.Current()
			if err != nil {
				return err
			}
			defer ns.Close()
			return server.RemoveGate(cmd.Context(), kernel.OpenRoot(g.root), ns)
		},
	}
}

// blockedTold prints sessions that are in the way of a drain, each reason once.
type blockedTold struct {
	w   io.Writer
	why map[string]string // by session
}

func (t blockedTold) tell(all []server.Blocked) {
	for _, b := range all {
		was, known := t.why[b.Session]
		if was == b.Why {
			continue
		}
		t.why[b.Session] = b.Why
		switch n := len(t.why); {
		case n <= mostStuck:
			fmt.Fprintf(t.w, "  ! in the way: %s\n", b)
		case n == mostStuck+1 && !known:
			fmt.Fprintln(t.w, "  ! and more: weir handoff server status --json has all")
		}
	}
}

// staying names the connections that a drain cannot move.
func staying(d server.Drained) string {
	var all []string
	if d.Immobile > 0 {
		all = append(all, fmt.Sprintf("%d sessions whose members move none", d.Immobile))
	}
	if d.Others > 0 {
		all = append(all, fmt.Sprintf("%d connections of programs that hand over nothing", d.Others))
	}
	return strings.Join(all, ", ")
}

func handoffDrain() *cobra.Command {
	var how server.Draining
	var patience time.Duration
	c := &cobra.Command{
		Use: "drain [SERVER]", Short: "Empty this server: its sessions move to the others", Args: cobra.MaximumNArgs(1),
		Long: `Have the front end give this server no new flows, and move every session of members
that move theirs to the other servers. It ends when none is left, and names the sessions
that are in the way meanwhile, with their addresses, their member and the reason.
Connections that cannot move, such as downloads from nginx, are counted in the end;
--wait waits for them as well. --undo has new flows come again. SERVER, if it is given,
must be this server's name: it guards against the wrong terminal.`,
		Example: `  weir handoff drain s2 --wait && systemctl poweroff
  weir handoff drain --undo`,
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) > 0 {
				name = args[0]
			}
			ctx := cmd.Context()
			if patience < 0 {
				return usageError{fmt.Errorf("--timeout %s: take a time to wait, or 0 to wait without an end", patience)}
			}
			if patience > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, patience)
				defer cancel()
			}
			var last server.Drained
			told := blockedTold{w: cmd.ErrOrStderr(), why: map[string]string{}}
			err := server.DrainHere(ctx, name, how, func(d server.Drained) {
				if d.Left != last.Left || d.Why != last.Why {
					fmt.Fprintln(cmd.ErrOrStderr(), strings.TrimSpace(fmt.Sprintf("%s: %d sessions left %s", d.Server, d.Left, d.Why)))
				}
				if stays := staying(d); how.All && d.Left == 0 && stays != staying(last) && stays != "" {
					fmt.Fprintf(cmd.ErrOrStderr(), "%s: waits for the end of %s\n", d.Server, stays)
				}
				told.tell(d.Blocked)
				last = d
			})
			if err != nil && patience > 0 && ctx.Err() != nil {
				err = fmt.Errorf("--timeout %s is over", patience)
			}
			switch {
			case err != nil && last.Left > 0:
				return fmt.Errorf("%d sessions are left, %d of them in the way; weir handoff server status names them, and new flows stay away until --undo: %w",
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

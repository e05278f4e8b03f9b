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
	if !s.Front {
		fmt.Fprintln(w, "  ! the front end's agent is not connected: no session can move")
	}
	t := newTable(w, "  SERVER", "AGENT")
	for _, name := range slices.Sorted(maps.Keys(s.Peers)) {
		state := "not connected"
		if s.Peers[name] {
			state = "connected"
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

func handoffDrain() *cobra.Command {
	var undo bool
	var patience time.Duration
	c := &cobra.Command{
		Use: "drain [SERVER]", Short: "Empty this server: its sessions move to the others", Args: cobra.MaximumNArgs(1),
		Long: `Have the front end give this server no new flows, and move every session of members
that move theirs to the other servers. It ends when none is left, and names the sessions
that are in the way meanwhile, with their addresses, their member and the reason. --undo
has new flows come again. SERVER, if it is given, must be this server's name: it guards
against the wrong terminal.`,
		Example: `  weir handoff drain s2 && systemctl poweroff
  weir handoff drain --undo`,
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) > 0 {
				name = args[0]
			}
			ctx := cmd.Context()
			if patience > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, patience)
				defer cancel()
			}
			var last server.Drained
			told := blockedTold{w: cmd.ErrOrStderr(), why: map[string]string{}}
			err := server.DrainHere(ctx, name, undo, func(d server.Drained) {
				if d.Left != last.Left || d.Why != last.Why {
					fmt.Fprintf(cmd.ErrOrStderr(), "%s: %d sessions left %s\n", d.Server, d.Left, d.Why)
				}
				told.tell(d.Blocked)
				last = d
			})
			switch {
			case err != nil && last.Left > 0:
				return fmt.Errorf("%d sessions are left, %d of them in the way; weir handoff server status names them, and new flows stay away until --undo: %w",
					last.Left, len(last.Blocked), err)
			case err != nil:
				return err
			case undo:
				fmt.Fprintln(cmd.OutOrStdout(), "new flows come again")
			case last.Immobile > 0:
				fmt.Fprintf(cmd.OutOrStdout(), "empty but for %d sessions whose members move none: they end in their own time\n", last.Immobile)
			default:
				fmt.Fprintln(cmd.OutOrStdout(), "empty")
			}
			return nil
		},
	}
	c.Flags().BoolVar(&undo, "undo", false, "have new flows come again")
	c.Flags().DurationVar(&patience, "timeout", 0, "give up after so long; 0: never")
	return c
}

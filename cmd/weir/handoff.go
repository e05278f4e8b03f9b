// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

func init() {
	cli.Add(cli.Feature{
		Name: keeper.FeatureName,
		Overview: []string{
			"weir handoff status|live sessions that outlive their processes",
			"weir handoff drain|this server emptied: its sessions move to others",
		},
		Commands: func(g *cli.Globals) []*cobra.Command { return []*cobra.Command{handoffCommand(g)} },
		Summary:  func(io.Writer, host.Status, bool, time.Time) {},
	})
}

func handoffCommand(g *cli.Globals) *cobra.Command {
	var socket string
	c := &cobra.Command{
		Use: "handoff", Short: "Live sessions that outlive the processes that serve them, and move between servers",
		Long: `A keeper has a duplicate of each live TCP connection of a service, with the state
that the application committed last. A member that is restarted or killed resets no
session: the next process goes on with it, to the byte. weir serve is a keeper, and
so is weir handoff keep by itself. Applications use the Go package clients/go/handoff,
clients/c/weir_handoff.h or clients/python/weir_handoff.py; docs/HANDOFF.md says what
they must do.`,
	}
	c.PersistentFlags().StringVar(&socket, "keeper", "", "the keeper's socket, @NAME for an abstract one (default $"+wire.SocketEnv+" or handoff.sock beside --socket)")
	at := func() string { return cmp.Or(socket, keeperSocket(g)) }
	c.AddCommand(handoffKeep(at), handoffStatus(g, at), handoffSend(at), handoffForget(at), handoffLB(), handoffServer(), backendCommand(g), handoffDrain())
	return c
}

func handoffKeep(at func() string) *cobra.Command {
	var l keeper.Limits
	var allow []string
	var metricsAt string
	c := &cobra.Command{
		Use: "keep", Short: "Keep sessions, without the rest of weir serve", Args: cobra.NoArgs,
		Long: `Keep the sessions of members. Root and the keeper's own user may be members of any
service; others of those that --allow names for them, by uid, gid, user, unit,
cgroup, pidfile or pid. It needs no right, and may run as the user of the service.
weir serve --only keeper does the same by a file, whose section handoff.keeper has the
flags as keys.

If the keeper ends, members have their sessions as before, and give them to the next
one as soon as it is there. Sessions that wait for a member meanwhile are reset,
unless systemd stores their descriptors (FileDescriptorStoreMax=).`,
		Example: `  weir handoff keep --allow telemetry:user=collector --allow telemetry:unit=nfacctd@0.service`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, a := range allow {
				r, err := keeper.ParseRule(a)
				if err != nil {
					return cli.Usage(fmt.Errorf("--allow %w", err))
				}
				l.Allow = append(l.Allow, r)
			}
			if err := checkLimits(cmd, l); err != nil {
				return err
			}
			return keep(cmd.Context(), wire.Socket(at()), metricsAt, l)
		},
	}
	f := c.Flags()
	f.StringArrayVar(&allow, "allow", nil, "SERVICE:KIND=VALUE: processes that are members of a service (* for every one), like telemetry:user=collector")
	f.DurationVar(&l.Hold, "hold", 30*time.Second, "how long a session waits for a member before it is reset")
	f.DurationVar(&l.Grace, "grace", time.Second, "how long it waits for one of its own name where another would take it")
	f.IntVar(&l.Sessions, "max-sessions", 10_000, "sockets of one user in one service")
	f.Int64Var((*int64)(&l.State), "max-state", 1<<20, "bytes of state of one session")
	f.Int64Var((*int64)(&l.Total), "max-total", 256<<20, "bytes of state of all sessions, in shares")
	f.StringVar(&metricsAt, "listen", "", "address of /metrics, like 127.0.0.1:9744; empty for none")
	return c
}

// keep runs only the session keeper of weir serve, with limits from flags in place of a file.
func keep(ctx context.Context, path, metricsAt string, limits keeper.Limits) error {
	log := cli.NewLog(os.Stderr)
	ignoreHangup(ctx, log, "sessions stay; its flags are read at a start")
	l, err := keeper.ListenAgain(ctx, log, path)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil // the same status as when cancelled later
	}
	if err != nil {
		return err
	}
	k := keeper.New(keeper.Options{Log: log, Store: keeper.Store()})
	k.Limit(limits)
	metrics, err := control.ListenMetrics(ctx, metricsAt, k.Collector(), log)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return k.Keep(ctx, l) })
	group.Go(func() error { return metrics(ctx) })
	return group.Wait()
}

// limitFlags maps keys of the section handoff.keeper to flags.
var limitFlags = map[string]string{"hold": "hold", "grace": "grace", "max_sessions": "max-sessions", "max_state": "max-state", "max_total": "max-total"}

// checkLimits rejects the numbers rejected in a configuration. It also rejects a typed 0. In a configuration 0 means the
// default.
func checkLimits(cmd *cobra.Command, l keeper.Limits) error {
	for _, key := range slices.Sorted(maps.Keys(limitFlags)) {
		f := cmd.Flags().Lookup(limitFlags[key])
		if f.Changed && (f.Value.String() == "0" || f.Value.String() == "0s") {
			return cli.Usage(fmt.Errorf("--%s %s: want more than 0", f.Name, f.Value))
		}
	}
	for _, p := range l.Problems() {
		return cli.Usage(fmt.Errorf("--%s %s", limitFlags[p.Key], p.Text))
	}
	return nil
}

func handoffStatus(g *cli.Globals, at func() string) *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use: "status [SERVICE]", Short: "Members, sessions, and what has become of them", Args: cobra.MaximumNArgs(1),
		Long: `Show the services that the keeper has members or sessions of: sessions with their
owner, age, positions as committed, and the bytes of their state. Users other than
root and the keeper's see those of which they are members.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := handoff.Status(cmd.Context(), at())
			if err != nil {
				return err
			}
			if len(args) > 0 {
				var one []handoff.ServiceReport
				for _, s := range r.Services {
					if s.Name == args[0] {
						one = append(one, s)
					}
				}
				if r.Services = one; len(one) == 0 {
					return fmt.Errorf("the keeper has nothing of service %q: weir handoff status shows all", args[0])
				}
			}
			if g.JSON {
				return cli.PrintJSON(cmd, r)
			}
			printHandoff(cmd.OutOrStdout(), r, all, time.Now())
			if len(r.Services) == 0 && os.Geteuid() != 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "the keeper shows this user its own services alone: sudo shows all")
			}
			return nil
		},
	}
	c.Flags().BoolVar(&all, "all", false, "show every session, and not only the first 20 of a service")
	cli.JSONFlag(c, g)
	return c
}

// printHandoff prints the report of a session keeper.
func printHandoff(w io.Writer, r handoff.Report, all bool, now time.Time) {
	if len(r.Services) == 0 {
		fmt.Fprintln(w, "no members and no sessions: docs/HANDOFF.md says what an application must do")
	}
	for i, s := range r.Services {
		if i > 0 {
			fmt.Fprintln(w)
		}
		n := s.Counts
		fmt.Fprintf(w, "%s: %d transferred, %d rescued after crashes, %d inherited; %d transfers refused; reset: %d expired, %d uncommitted, %d closed\n",
			s.Name, n.Transfers, n.Rescued, n.Inherited, n.Rejected, n.Expired, n.Gaps, n.Closed)
		if n.OverLimit > 0 {
			fmt.Fprintf(w, "  ! %d sockets or states were over the keeper's limits\n", n.OverLimit)
		}
		if len(s.Members) > 0 {
			printMembers(w, s.Members, now)
		}
		printKept(w, s.Sessions, all, now)
	}
}

func printMembers(w io.Writer, members []handoff.MemberReport, now time.Time) {
	type row struct {
		Name     string    `table:"MEMBER"`
		PID      int       `table:"PID"`
		UID      uint32    `table:"USER"`
		Sessions int       `table:"SESSIONS"`
		Since    time.Time `table:"FOR"`
		Note     string    `table:""`
	}
	var rows []row
	for _, m := range members {
		note := ""
		switch {
		case !m.Ready:
			note = "not ready"
		case m.Standby:
			note = "replaced, stands by"
		}
		rows = append(rows, row{m.Name, m.PID, m.UID, m.Sessions, m.Since, note})
	}
	cli.PrintIndentedRows(w, rows, now)
}

func printKept(w io.Writer, sessions []handoff.SessionReport, all bool, now time.Time) {
	const few = 20
	if len(sessions) == 0 {
		return
	}
	if all {
		printHandoffSessions(w, sessions, now)
	} else {
		printHandoffSessions(w, sessions[:min(few, len(sessions))], now)
	}
	if n := len(sessions); n > few && !all {
		fmt.Fprintf(w, "  %d more: --all shows them\n", n-few)
	}
	refused := 0
	for _, s := range sessions {
		if s.ReturnReason == "" {
			continue
		}
		if refused++; refused > few && !all {
			continue
		}
		fmt.Fprintf(w, "  ! session %s, %s to %s, was not moved from member %s: %s\n", s.ID, s.Remote, s.Local, s.Member, s.ReturnReason)
	}
	if refused > few && !all {
		fmt.Fprintf(w, "  ! and %d more: --all shows them\n", refused-few)
	}
}

func printHandoffSessions(w io.Writer, sessions []handoff.SessionReport, now time.Time) {
	type row struct {
		ID      string    `table:"ID"`
		Kind    string    `table:"KIND"`
		Remote  string    `table:"REMOTE,dash"`
		Local   string    `table:"LOCAL"`
		Member  string    `table:"MEMBER"`
		Since   time.Time `table:"AGE"`
		Read    uint64    `table:"READ,bytes"`
		Written uint64    `table:"WRITTEN,bytes"`
		State   uint64    `table:"STATE,bytes"`
		Moves   int       `table:"MOVES"`
	}
	var rows []row
	for _, s := range sessions {
		member := s.Member
		if s.PID == 0 {
			member = fmt.Sprintf("(%s, waits %.0fs)", s.Member, s.Waits)
		}
		rows = append(rows, row{s.ID, s.Kind, s.Remote, s.Local, member, s.Since, s.Read, s.Written, uint64(s.State), s.Moves})
	}
	cli.PrintIndentedRows(w, rows, now)
}

func handoffSend(at func() string) *cobra.Command {
	c := &cobra.Command{
		Use: "send SESSION|SERVICE/MEMBER [TO]", Short: "Have a member give a session, or all it has, to another", Args: cobra.RangeArgs(1, 2),
		Long: `Ask the owner of a session (its number, as weir handoff status shows it), or of all
the sessions of a member, to move it to member TO of the same service; without TO to
whichever is ready and has the fewest. It waits until they have moved.`,
		Example: `  weir handoff send 4711 1        # session 4711 to member 1
  weir handoff send telemetry/0   # all of member 0's, to others`,
		RunE: func(cmd *cobra.Command, args []string) error {
			to := ""
			if len(args) > 1 {
				to = args[1]
			}
			service, member, isMember := strings.Cut(args[0], "/")
			var id uint64
			if !isMember {
				var err error
				if id, err = strconv.ParseUint(args[0], 10, 64); err != nil || id == 0 {
					return cli.Usage(fmt.Errorf("%q: want the number of a session, or SERVICE/MEMBER; see %s --help", args[0], cmd.CommandPath()))
				}
			}
			status := func() (handoff.Report, error) { return handoff.Status(cmd.Context(), at()) }
			r, err := status()
			if err != nil {
				return err
			}
			var before []handoff.SessionReport
			for _, s := range r.Services {
				for _, x := range s.Sessions {
					if x.Kind == "session" && (x.ID == args[0] || isMember && s.Name == service && x.Member == member) {
						before = append(before, x)
					}
				}
			}
			if err := handoff.Send(cmd.Context(), at(), service, member, id, to); err != nil {
				return err
			}
			return waitMoved(cmd, before, to, status)
		},
	}
	return c
}

func handoffForget(at func() string) *cobra.Command {
	var listeners bool
	c := &cobra.Command{
		Use: "forget SESSION|SERVICE/MEMBER", Short: "Let go of what waits for a member that will not come back", Args: cobra.ExactArgs(1),
		Long: `Have the keeper let go of a session that waits for a member (its number, as weir handoff
status shows it), or of all sockets that wait for a member: its listeners, whose address
is free at once, its UDP sockets, and its sessions, which are reset. Else they wait for the
keeper's --hold (30 s): connections to the address hang meanwhile. What a living process
has is not touched. With --listeners sessions go on waiting: for a process that is to
listen at another address.`,
		Example: `  systemctl disable --now collector@0 && weir handoff forget telemetry/0`,
		RunE: func(cmd *cobra.Command, args []string) error {
			service, member, isMember := strings.Cut(args[0], "/")
			var id uint64
			if !isMember {
				var err error
				if id, err = strconv.ParseUint(args[0], 10, 64); err != nil || id == 0 {
					return cli.Usage(fmt.Errorf("%q: want the number of a session, or SERVICE/MEMBER; see %s --help", args[0], cmd.CommandPath()))
				}
			}
			n, err := handoff.Forget(cmd.Context(), at(), service, member, id, listeners)
			if err == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "%d forgotten\n", n)
			}
			return err
		},
	}
	c.Flags().BoolVar(&listeners, "listeners", false, "listeners and UDP sockets alone")
	return c
}

// waitMoved waits until each session has moved or has returned. A rejected session returns to its member.
func waitMoved(cmd *cobra.Command, before []handoff.SessionReport, to string, now func() (handoff.Report, error)) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		r, err := now()
		if err != nil {
			return err
		}
		stay, back, why := movedFrom(before, r)
		if stay == 0 && back == 0 {
			ended := 0
			if !wire.Elsewhere(to) { // after a move to another host, the keeper has no session to tell a move from an end
				ended = len(before) - kept(before, r)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%d moved", len(before)-ended)
			if ended > 0 {
				fmt.Fprintf(cmd.OutOrStdout(), ", %d ended", ended)
			}
			fmt.Fprintln(cmd.OutOrStdout())
			return nil
		}
		if stay == 0 {
			return fmt.Errorf("%d of %d sessions came back: %s", back, len(before), why)
		}
		if time.Now().After(end) {
			return fmt.Errorf("%d of %d sessions have not moved after 10 s: the log of their member says why", stay, len(before))
		}
	}
}

// kept counts the sessions that the keeper still has.
func kept(before []handoff.SessionReport, r handoff.Report) (n int) {
	is := map[string]bool{}
	for _, v := range r.Services {
		for _, s := range v.Sessions {
			is[s.ID] = true
		}
	}
	for _, was := range before {
		if is[was.ID] {
			n++
		}
	}
	return n
}

// movedFrom counts the sessions still in transfer (stay) and the returned sessions (back). why is the reason of one
// returned session.
func movedFrom(before []handoff.SessionReport, r handoff.Report) (stay, back int, why string) {
	after := map[string]handoff.SessionReport{}
	for _, v := range r.Services {
		for _, s := range v.Sessions {
			after[s.ID] = s
		}
	}
	for _, was := range before {
		is, ok := after[was.ID]
		switch {
		case !ok: // it has another number at its new backend
		case is.Moves == was.Moves && is.Rejected > was.Rejected && !is.Given && is.PID == was.PID:
			back++
			why = is.ReturnReason
		case is.Moves == was.Moves, is.Given, is.PID == 0, wire.Elsewhere(is.Member):
			stay++
		case is.Member == was.Member && is.PID == was.PID:
			back++
			why = cmp.Or(is.ReturnReason, "the log of the agents of both servers says why")
		}
	}
	return stay, back, why
}

// keeperSocket returns the keeper's socket beside --socket. It returns "", the default, if --socket is unset or the
// environment names the keeper's socket.
func keeperSocket(g *cli.Globals) string {
	if g.Socket == "" || os.Getenv(wire.SocketEnv) != "" {
		return ""
	}
	return filepath.Join(filepath.Dir(g.Socket), filepath.Base(wire.DefaultSocket))
}

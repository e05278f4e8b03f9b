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
	"github.com/weir-project/weir/feature/handoff/backend"
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
			"weir handoff status|live sessions held across process restarts",
			"weir handoff drain|empty this backend: move its sessions to others",
		},
		Commands: func(g *cli.Globals) []*cobra.Command { return []*cobra.Command{handoffCommand(g)} },
		Summary:  func(io.Writer, host.Status, bool, time.Time) {},
		Names:    map[string]func(host.Status) []string{"BACKEND": ownBackend},
		Choices:  map[string]cli.Choice{"SERVICE": keptServices, "SESSION|SERVICE/MEMBER": keptSessions, "TO": receivers},
	})
}

// keptReports asks the keeper of a command line for its services.
func keptReports(cmd *cobra.Command, g *cli.Globals) []handoff.ServiceReport {
	ctx, cancel := context.WithTimeout(context.Background(), completing)
	defer cancel()
	socket := ""
	if f := cmd.Flag("keeper"); f != nil {
		socket = f.Value.String()
	}
	r, err := handoff.Status(ctx, cmp.Or(socket, keeperSocket(g)))
	if err != nil {
		return nil
	}
	return r.Services
}

func keptServices(cmd *cobra.Command, g *cli.Globals, _ []string) (out []string) {
	for _, s := range keptReports(cmd, g) {
		out = append(out, s.Name)
	}
	return out
}

// maxSessions bounds the completed sessions.
const maxSessions = 100

// keptSessions completes members, and sessions with their addresses.
func keptSessions(cmd *cobra.Command, g *cli.Globals, _ []string) (out []string) {
	var sessions []string
	for _, s := range keptReports(cmd, g) {
		for _, m := range s.Members {
			out = append(out, s.Name+"/"+m.Name)
		}
		for _, x := range s.Sessions {
			if x.Kind == "listener" { // it stays with its member
				continue
			}
			sessions = append(sessions, cobra.CompletionWithDesc(x.ID, fmt.Sprintf("%s of %s/%s from %s", x.Kind, s.Name, x.Member, x.Remote)))
		}
	}
	return append(out, sessions[:min(maxSessions, len(sessions))]...)
}

// receivers completes the other members of the service in the first argument.
func receivers(cmd *cobra.Command, g *cli.Globals, args []string) (out []string) {
	service, member, _ := strings.Cut(args[0], "/")
	for _, s := range keptReports(cmd, g) {
		at := slices.IndexFunc(s.Sessions, func(x handoff.SessionReport) bool { return x.ID == args[0] })
		if at < 0 && s.Name != service {
			continue
		}
		from := member
		if at >= 0 {
			from = s.Sessions[at].Member
		}
		for _, m := range s.Members {
			if m.Name != from {
				out = append(out, m.Name)
			}
		}
	}
	return out
}

// ownBackend returns the name of this backend.
func ownBackend(st host.Status) []string {
	if r, ok := host.Part[backend.Report](st, backend.Name); ok && r.Spec != nil {
		return []string{r.Spec.Name}
	}
	return nil
}

func handoffCommand(g *cli.Globals) *cobra.Command {
	var socket string
	c := &cobra.Command{
		Use: "handoff", Short: "Keep live sessions across restarts, and move them",
		Long: `A session keeper holds a duplicate of each live TCP connection of a service, with
the last state committed by the application. A restarted or killed member loses no
session: the next process continues each session at the exact byte. weir serve is
a keeper. weir handoff keep runs one by itself. Applications use the Go package
clients/go/handoff, clients/c/weir_handoff.h or clients/python/weir_handoff.py;
see docs/HANDOFF.md.`,
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
		Use: "keep", Short: "Run only the session keeper of weir serve", Args: cobra.NoArgs,
		Long: `Keep the live sessions of members. Root and the keeper's own user may be members
of any service. --allow admits other processes to a service by uid, gid, user,
unit, cgroup, pidfile or pid. The keeper needs no rights, and may run as the user
of the service. weir serve --only keeper does the same with a file: the flags are
keys of its section handoff.keeper.

If the keeper ends, members keep their sessions and register them with the next
keeper. Sessions without a member are then reset, unless systemd stores their
descriptors (FileDescriptorStoreMax=).`,
		Example: `  weir handoff keep --allow flows:user=pmacct --allow flows:unit=nfacctd.service`,
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
	f.StringArrayVar(&allow, "allow", nil, "SERVICE:KIND=VALUE: admit processes as members of a service (* for all services), like telemetry:user=collector")
	f.DurationVar(&l.Hold, "hold", 30*time.Second, "time a session waits for a member before it is reset")
	f.DurationVar(&l.Grace, "grace", time.Second, "time a session waits for its own member before another one may take it")
	f.IntVar(&l.Sessions, "max-sessions", 10_000, "maximum sockets of one user in one service")
	f.Int64Var((*int64)(&l.State), "max-state", 1<<20, "maximum bytes of state of one session")
	f.Int64Var((*int64)(&l.Total), "max-total", 256<<20, "maximum bytes of state of all sessions, shared between users")
	f.StringVar(&metricsAt, "listen", "", "address of /metrics, like 127.0.0.1:9744; empty for none")
	return c
}

// keep runs only the session keeper of weir serve, with limits from flags in place of a file.
func keep(ctx context.Context, path, metricsAt string, limits keeper.Limits) error {
	log := cli.NewLog(os.Stderr)
	ignoreHangup(ctx, log, "restart the keeper to change its flags: sessions stay")
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
		Use: "status [SERVICE]", Short: "Show members, sessions and their outcomes", Args: cobra.MaximumNArgs(1),
		Long: `Show the services known to the keeper, and their sessions with owner, age,
committed positions and state size. Users other than root and the keeper's see
only services with their own members.`,
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
					return fmt.Errorf("the keeper has no members or sessions of service %q: weir handoff status shows all", args[0])
				}
			}
			if g.JSON {
				return cli.PrintJSON(cmd, r)
			}
			printHandoff(cmd.OutOrStdout(), r, all, time.Now())
			if len(r.Services) == 0 && os.Geteuid() != 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "the keeper shows this user only its own services: use sudo to see all")
			}
			return nil
		},
	}
	c.Flags().BoolVar(&all, "all", false, "show all sessions, not only the first 20 of a service")
	cli.JSONFlag(c, g)
	return c
}

// printHandoff prints the report of a session keeper.
func printHandoff(w io.Writer, r handoff.Report, all bool, now time.Time) {
	if len(r.Services) == 0 {
		cli.Note(w, "no members and no sessions: docs/HANDOFF.md describes how applications join\n")
	}
	for i, s := range r.Services {
		if i > 0 {
			fmt.Fprintln(w)
		}
		cli.Note(w, "%s: %s, %s\n", s.Name, fmt.Count(len(s.Members), "member"), fmt.Count(live(s.Sessions), "session"))
		if s.Counts.OverLimit > 0 {
			cli.Note(w, "  ! %s, retries included, exceeded the keeper's limits since its start\n", fmt.Count(s.Counts.OverLimit, "request"))
		}
		if len(s.Members) > 0 {
			printMembers(w, s.Members, now)
		}
		printKept(w, s.Sessions, all, now)
		printOutcomes(w, s.Counts)
	}
}

// live counts the sessions without listeners and other sockets.
func live(all []handoff.SessionReport) (n int) {
	for _, s := range all {
		if s.Kind == "session" {
			n++
		}
	}
	return n
}

// printOutcomes prints the counters since the start of the keeper.
func printOutcomes(w io.Writer, n handoff.Counts) {
	cli.Note(w, "  moved so far: %d by transfer, %d after a crash, %d inherited; %s refused\n", n.Transfers, n.Rescued, n.Inherited, fmt.Count(int(n.Rejected), "transfer"))
	cli.Note(w, "  reset so far: %d expired, %d with uncommitted bytes, %d closed by the peer\n", n.Expired, n.Gaps, n.Closed)
}

func printMembers(w io.Writer, members []handoff.MemberReport, now time.Time) {
	type row struct {
		Name     string    `table:"MEMBER"`
		PID      int       `table:"PID"`
		UID      uint32    `table:"USER"`
		Sessions int       `table:"SESSIONS"`
		Since    time.Time `table:"SINCE"`
		Note     string    `table:""`
	}
	var rows []row
	for _, m := range members {
		note := ""
		switch {
		case !m.Ready:
			note = "not ready"
		case m.Standby:
			note = "replaced, on standby"
		}
		rows = append(rows, row{m.Name, m.PID, m.UID, m.Sessions, m.Since, note})
	}
	cli.PrintIndentedRows(w, rows, now)
}

// printKept prints the kept sockets: first the sessions, then listeners and UDP sockets.
func printKept(w io.Writer, kept []handoff.SessionReport, all bool, now time.Time) {
	const few = 20
	some := func(sockets []handoff.SessionReport) []handoff.SessionReport {
		if all {
			return sockets
		}
		return sockets[:min(few, len(sockets))]
	}
	var sessions, others []handoff.SessionReport
	for _, s := range kept {
		if s.Kind == "session" {
			sessions = append(sessions, s)
		} else {
			others = append(others, s)
		}
	}
	printHandoffSessions(w, some(sessions), now)
	printHandoffSockets(w, some(others), now)
	if n := len(sessions) + len(others) - len(some(sessions)) - len(some(others)); n > 0 {
		cli.Note(w, "  %d more: --all shows them\n", n)
	}
	refused := 0
	for _, s := range sessions {
		if s.ReturnReason == "" {
			continue
		}
		if refused++; refused > few && !all {
			continue
		}
		cli.Note(w, "  ! session %s, %s to %s, was not moved from member %s: %s\n", s.ID, s.Remote, s.Local, s.Member, s.ReturnReason)
	}
	if refused > few && !all {
		cli.Note(w, "  ! and %d more: --all shows them\n", refused-few)
	}
}

func printHandoffSessions(w io.Writer, sessions []handoff.SessionReport, now time.Time) {
	type row struct {
		ID      string    `table:"SESSION"`
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
		rows = append(rows, row{s.ID, s.Remote, s.Local, keptBy(s), s.Since, s.Read, s.Written, uint64(s.State), s.Moves})
	}
	if len(rows) > 0 {
		cli.PrintIndentedRows(w, rows, now)
	}
}

func printHandoffSockets(w io.Writer, sockets []handoff.SessionReport, now time.Time) {
	type row struct {
		ID     string    `table:"SOCKET"`
		Kind   string    `table:"KIND"`
		Local  string    `table:"LOCAL"`
		Member string    `table:"MEMBER"`
		Since  time.Time `table:"AGE"`
		State  uint64    `table:"STATE,bytes"`
		Moves  int       `table:"MOVES"`
	}
	var rows []row
	for _, s := range sockets {
		rows = append(rows, row{s.ID, s.Kind, s.Local, keptBy(s), s.Since, uint64(s.State), s.Moves})
	}
	if len(rows) > 0 {
		cli.PrintIndentedRows(w, rows, now)
	}
}

// keptBy names the member of a socket, and the time that a socket without one has waited.
func keptBy(s handoff.SessionReport) string {
	if s.PID == 0 {
		return fmt.Sprintf("(%s, waits %.0fs)", s.Member, s.Waits)
	}
	return s.Member
}

func handoffSend(at func() string) *cobra.Command {
	c := &cobra.Command{
		Use: "send SESSION|SERVICE/MEMBER [TO]", Short: "Move a session, or all sessions of a member, to another member", Args: cobra.RangeArgs(1, 2),
		Long: `Ask the owner of a session, or of all sessions of a member, to move them to member
TO of the same service. SESSION is its number in weir handoff status. Without TO
the ready member with the fewest sessions receives them. The command waits for the
moves.`,
		Example: `  weir handoff send 4711 1        # move session 4711 to member 1
  weir handoff send telemetry/0   # move all sessions of member 0`,
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
		Use: "forget SESSION|SERVICE/MEMBER", Short: "Release the sockets waiting for a member that will not return", Args: cobra.ExactArgs(1),
		Long: `Make the keeper release a waiting session (by its number in weir handoff status),
or all waiting sockets of a member. Listeners and UDP sockets are closed, their
addresses are free at once, and sessions are reset. Otherwise they wait for --hold
of the keeper (30 s) and connections to the address hang meanwhile. Sockets of a
living process are not touched. --listeners keeps the sessions waiting, for a
process that will listen on another address.`,
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
	c.Flags().BoolVar(&listeners, "listeners", false, "release only listeners and UDP sockets")
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
			return fmt.Errorf("%d of %d sessions were returned: %s", back, len(before), why)
		}
		if time.Now().After(end) {
			return fmt.Errorf("%d of %d sessions have not moved after 10 s: see the log of their member", stay, len(before))
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
			why = cmp.Or(is.ReturnReason, "see the logs of both backends' agents")
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

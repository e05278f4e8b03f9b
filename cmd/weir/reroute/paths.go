// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"cmp"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/terminal"
	"github.com/weir-project/weir/kernel"
)

func rerouteStatus(g *cli.Globals) *cobra.Command {
	var watch bool
	c := &cobra.Command{
		Use: "status [PATH]", Short: "Show links, their state in each direction, and the traffic's path", Args: cobra.MaximumNArgs(1),
		Long: `Show paths, their links' state, their rerouted packets and the repairs in use.
Show probe sessions too: each direction by itself, round trips, loss, and verdicts
delayed by a stall of this host.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			for {
				st, err := host.Ask[reroute.State](cmd.Context(), g.Reader(), reroute.Name, feature.StatusQuery, nil)
				if err != nil {
					return err
				}
				if len(args) > 0 {
					if st = onlyPath(st, args[0]); len(st.Paths)+len(st.Sessions)+len(st.BFD) == 0 {
						return fmt.Errorf("no path %q: weir reroute status shows all", args[0])
					}
				}
				if g.JSON {
					err = cli.PrintJSON(cmd, st)
				} else if watch {
					terminal.Erase(cmd.OutOrStdout())
					printReroute(cmd.OutOrStdout(), st)
				} else {
					cli.TellFaults(cmd, g, "reroute")
					printReroute(cmd.OutOrStdout(), st)
				}
				if err != nil || !watch {
					return cmp.Or(err, st.Err())
				}
				select {
				case <-cmd.Context().Done():
					return nil
				case <-time.After(time.Second):
				}
			}
		},
	}
	c.Flags().BoolVar(&watch, "watch", false, "refresh every second")
	cli.JSONFlag(c, g)
	return c
}

// onlyPath returns the part of st about one path.
func onlyPath(st reroute.State, name string) reroute.State {
	st.Paths = slices.DeleteFunc(st.Paths, func(p protect.PathState) bool { return p.Name != name })
	st.BFD = slices.DeleteFunc(st.BFD, func(s peers.SessionState) bool { return s.Name != name })
	st.Sessions = slices.DeleteFunc(st.Sessions, func(s liveness.SessionState) bool {
		return s.Name != name && !slices.ContainsFunc(st.Paths, func(p protect.PathState) bool { return p.Device == s.Device && p.Netns == s.Netns })
	})
	return st
}

func rerouteDrain(g *cli.Globals) *cobra.Command {
	return linkCommand(g, "drain PATH", "Take a path's link out of use at once, for maintenance",
		`Reroute the traffic of a path's link, with all its paths, until weir reroute undrain.
The drain survives weir serve and weir apply.

It moves packets, not routes: setting a device down removes its routes. First raise
the link's metric in the routing protocol, and wait until its routes are gone. This
command prints the remaining routes.`, reroute.Drain, reroute.GoWithDown)
}

func rerouteUndrain(g *cli.Globals) *cobra.Command {
	return linkCommand(g, "undrain PATH", "Allow a path's link to be used again",
		`End weir reroute drain. The link is used at once, unless it has no carrier or its
probes fail.`, reroute.Undrain, nil)
}

func linkCommand(g *cli.Globals, use, short, long string, do func(*kernel.WriteLock, string) error, note func(*kernel.Root, string) (string, error)) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Long: long, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := g.Host().Root.Lock(cmd.Context())
			if err != nil {
				return err
			}
			err = do(l, args[0])
			l.Unlock()
			if err != nil || note == nil {
				return err
			}
			text, err := note(g.Host().Root, args[0])
			if err != nil {
				return fmt.Errorf("done, but the routes of the link are unreadable: %w", err)
			}
			if text != "" {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning:", text)
			}
			return nil
		},
	}
}

// printPaths prints one line for each path and session.
func printPaths(w io.Writer, st reroute.State) {
	if len(st.Paths) > 0 {
		type row struct {
			Name    string `table:"PATH"`
			Device  string `table:"LINK"`
			State   string `table:"STATE"`
			Packets uint64 `table:"REROUTED"`
			Bytes   uint64 `table:"BYTES,bytes"`
			Netns   string `table:"NETNS"`
		}
		var rows []row
		for _, p := range st.Paths {
			rows = append(rows, row{p.Name, p.Device, linkText(p), p.Counts.Packets, p.Counts.Bytes, p.Netns})
		}
		cli.PrintRows(w, rows, time.Time{})
	}
	if len(st.Sessions) > 0 {
		if len(st.Paths) > 0 {
			fmt.Fprintln(w)
		}
		printSessions(w, st.Sessions)
	}
	for _, s := range st.Sessions {
		if s.Problem != "" {
			cli.Note(w, "! %s: %s\n", s.Name, s.Problem)
		}
		if s.Phase == liveness.Init && s.Problem == "" && !s.Kept {
			cli.Note(w, "%s: no probe is answered yet: the link is used, unprobed\n", s.Name)
		}
		if s.Kept {
			cli.Note(w, "%s: the link was down before the session ended or changed: it stays down until probes are answered\n", s.Name)
		}
	}
	printBFD(w, st.BFD, len(st.Paths)+len(st.Sessions) > 0)
}

// printSessions prints one line for each probe session.
func printSessions(w io.Writer, all []liveness.SessionState) {
	type row struct {
		Name    string             `table:"SESSION"`
		Device  string             `table:"LINK"`
		Phase   liveness.Phase     `table:"STATE"`
		Out     liveness.Direction `table:"OUT"`
		In      liveness.Direction `table:"IN"`
		Flaps   uint32             `table:"FLAPS"`
		RTT     string             `table:"RTT"`
		P99     string             `table:"P99"`
		Jitter  string             `table:"JITTER"`
		LostOut uint32             `table:"LOST OUT"`
		LostIn  uint32             `table:"LOST IN"`
		Netns   string             `table:"NETNS"`
	}
	var rows []row
	for _, s := range all {
		rows = append(rows, row{s.Name, s.Device, s.Phase, s.Out, s.In, s.Flaps, fine(s.RTT.P50), fine(s.RTT.P99), fine(s.RTT.Jitter),
			s.LostOut, s.LostIn + s.LostHeard, s.Netns})
	}
	cli.PrintRows(w, rows, time.Time{})
}

// printBFD prints one line for each BFD session.
func printBFD(w io.Writer, all []peers.SessionState, below bool) {
	if len(all) == 0 {
		return
	}
	if below {
		fmt.Fprintln(w)
	}
	if there := slices.DeleteFunc(slices.Clone(all), func(s peers.SessionState) bool { return s.Unjudged }); len(there) > 0 {
		printBFDRows(w, there)
	}
	for _, s := range all {
		if s.Problem != "" {
			cli.Note(w, "! %s: %s\n", s.Name, s.Problem)
		}
		if s.NotAuthentic > 0 && s.State != bfd.Up {
			cli.Note(w, "%s: %s of the peer rejected as not authentic: set key_file, key_id and auth to the same values at both ends, or remove them at both; without a key, only one source port of the peer is accepted\n", s.Name, fmt.Count(s.NotAuthentic, "packet"))
		}
		if s.Echo != nil {
			cli.Note(w, "%s: %s\n", s.Name, echoText(s.Echo))
		}
	}
}

func printBFDRows(w io.Writer, all []peers.SessionState) {
	type row struct {
		Name      string        `table:"BFD"`
		Device    string        `table:"LINK"`
		Peer      netip.Addr    `table:"PEER"`
		State     string        `table:"STATE"`
		Since     time.Duration `table:"SINCE"`
		Remote    bfd.State     `table:"PEER STATE"`
		Interval  string        `table:"INTERVAL"`
		Detection string        `table:"DETECTION TIME"`
		Downs     uint64        `table:"DOWNS"`
		Netns     string        `table:"NETNS"`
	}
	var rows []row
	for _, s := range all {
		state := s.State.String()
		if s.Diag != 0 && s.State != bfd.Up {
			state += ": " + s.Diag.String()
		}
		rows = append(rows, row{s.Name, s.Device, s.Peer, state, s.Since.Round(time.Second), s.Remote, fine(s.Interval), fine(s.Detection), s.Downs, s.Netns})
	}
	cli.PrintRows(w, rows, time.Time{})
}

// echoText describes the result of echo packets.
func echoText(e *peers.Echo) string {
	switch {
	case e.Failed:
		return fmt.Sprintf("echo packets no longer return: the link stays unused until they do (%d sent, %d returned)", e.Sent, e.Returned)
	case e.Interval == 0:
		return "no echo: the session is not up, or the peer does not announce echo support"
	case e.Returned == 0:
		return fmt.Sprintf("echo every %s has never returned, and has no effect: does the peer forward packets? (%d sent)", fine(e.Interval), e.Sent)
	}
	return fmt.Sprintf("echo every %s, back after %s (%d sent, %d returned, failed %s)", fine(e.Interval), fine(e.RTT), e.Sent, e.Returned, fmt.Count(e.Failures, "time"))
}

// linkText describes whether a link is used.
func linkText(p protect.PathState) string {
	var why []string
	for _, r := range []struct {
		on   bool
		text string
	}{{p.Carrier, "no carrier"}, {p.Probe, "not answered"}, {p.Drain, "drained"}} {
		if r.on {
			why = append(why, r.text)
		}
	}
	switch {
	case p.Gone:
		return "namespace is gone"
	case !p.Attached:
		return "not attached"
	case !p.Down && p.Unjudged:
		return "used, not monitored"
	case !p.Down:
		return "used"
	case len(p.Dropped) > 0:
		return droppedText(p) + ": " + strings.Join(why, ", ")
	case p.Shadow:
		return "used (shadow: " + strings.Join(why, ", ") + ")"
	}
	return "rerouted: " + strings.Join(why, ", ")
}

// droppedText describes the IP versions left without a repair.
func droppedText(p protect.PathState) string {
	switch {
	case len(p.Dropped) > 1:
		return "dropped, no way left"
	case slices.ContainsFunc(p.Repairs, func(r protect.RepairState) bool { return !r.Down }):
		return "rerouted, but " + p.Dropped[0] + " dropped, no way left"
	}
	return p.Dropped[0] + " dropped, no way left"
}

// fine rounds a duration to 10 µs, or to 100 ns below 1 ms.
func fine(d time.Duration) string {
	switch {
	case d == 0:
		return "-"
	case d < time.Millisecond:
		return d.Round(100 * time.Nanosecond).String()
	}
	return d.Round(10 * time.Microsecond).String()
}

// printReroute prints paths and sessions in detail.
func printReroute(w io.Writer, st reroute.State) {
	if len(st.Paths)+len(st.Sessions)+len(st.BFD) == 0 {
		cli.Note(w, "no paths: define links to protect in the section reroute of weir.yaml (docs/REROUTE.md)\n")
		return
	}
	printPaths(w, st)
	for _, p := range st.Paths {
		fmt.Fprintln(w)
		printPath(w, p)
	}
	for _, s := range st.Sessions {
		if len(s.Counts) > 0 || granted(s) > 0 {
			fmt.Fprintln(w)
			printSession(w, s)
		}
	}
	if text := countsText(st.UnknownSources); text != "" {
		cli.Note(w, "\nprobe-like packets without a session: %s\n", text)
	}
	if len(st.TimerLoops) > 0 {
		cli.Note(w, "\ntimer loops of the probes: a stall delays verdicts\n")
		printTimerLoops(w, st.TimerLoops)
	}
}

func printTimerLoops(w io.Writer, all []liveness.TimerLoopState) {
	type row struct {
		Number  int    `table:"LOOP"`
		CPU     int    `table:"CPU"`
		Ticks   uint64 `table:"TICKS"`
		Stalls  uint64 `table:"STALLS"`
		Longest string `table:"LONGEST STALL"`
		Takes   string `table:"TICK TIME"`
		Netns   string `table:"NETNS"`
	}
	var rows []row
	for i, l := range all {
		rows = append(rows, row{i, l.CPU, l.Ticks, l.Stalls, fine(l.Longest), fine(l.Spent / time.Duration(max(l.Ticks, 1))), l.Netns})
	}
	cli.PrintRows(w, rows, time.Time{})
}

func printPath(w io.Writer, p protect.PathState) {
	what := "all"
	if len(p.Prefixes) > 0 {
		what = strings.Trim(fmt.Sprint(p.Prefixes), "[]")
	}
	cli.Note(w, "%s: %s by %s, %s\n", p.Name, what, p.Device, linkText(p))
	for _, problem := range p.Problems {
		cli.Note(w, "  ! %s\n", problem)
	}
	if len(p.Dropped) > 0 {
		cli.Note(w, "  ! packets are dropped: %s\n", p.Remedy)
	}
	for i, r := range p.Repairs {
		state := ""
		if r.Down {
			state = ", not usable either"
		}
		if r.Learnt {
			state = " (learnt)" + state
		}
		cli.Note(w, "  repair %d: by %s to %s, packets up to %d bytes%s\n", i+1, r.Device, r.Via, r.Fits, state)
	}
	for _, line := range routesText(p) {
		cli.Note(w, "  %s\n", line)
	}
	c := p.Counts
	cli.Note(w, "  packets rerouted: %d (%d at ingress, %d not by the best repair), %d too big\n", c.Packets, c.Fast, c.Next, c.Big)
	cli.Note(w, "  packets stayed: %d (exempt %d, no repair %d)\n", c.Exempt+c.None, c.Exempt, c.None)
	cli.Note(w, "  packets dropped: %d (no way left %d, too big %d, kernel %d)\n", c.Stuck+c.Lost+c.Odd, c.Stuck, c.Lost, c.Odd)
	if c.Shadow > 0 {
		cli.Note(w, "  shadow: %s would have been rerouted\n", fmt.Count(c.Shadow, "packet"))
	}
}

// routesText describes the routes dependent on a path's interface, and the traffic lost without it.
func routesText(p protect.PathState) (lines []string) {
	r := p.Routes
	if r.Alone > 0 {
		lines = append(lines, fmt.Sprintf("routes: %d use only %s and disappear when it is set down, drained or not; %d of them disappear with its carrier", r.Alone, p.Device, r.Carrier))
	}
	if refused := r.Carrier - r.Kept; r.Alone > 0 && refused > 0 {
		lines = append(lines, fmt.Sprintf("! packets to %d of these are then unreachable: weir doctor names them", refused))
	}
	switch {
	case r.Kept == 0:
	case r.Lost > 0 && r.InUse:
		lines = append(lines, fmt.Sprintf("! %s disappeared with the carrier: packets are rerouted until the routing protocol has new routes", fmt.Count(r.Lost, "route")))
	case r.Lost > 0:
		lines = append(lines, fmt.Sprintf("! %s disappeared with the link, and no others replace them: packets are unreachable", fmt.Count(r.Lost, "route")))
	case !r.Followed:
		lines = append(lines, fmt.Sprintf("! packets to %d are then rerouted only while weir serve runs: start it", r.Kept))
	default:
		lines = append(lines, fmt.Sprintf("weir serve then reroutes packets to %d, for %s at most", r.Kept, protect.KeepTime))
	}
	return lines
}

func granted(s liveness.SessionState) (n uint32) {
	for _, j := range []*liveness.Judgement{s.Sender, s.Peer} {
		if j != nil {
			n += j.Granted
		}
	}
	return n
}

func printSession(w io.Writer, s liveness.SessionState) {
	cli.Note(w, "%s: %d probes sent, %d answered; %d heard\n", s.Name, s.Sent, s.Answered, s.Heard)
	if n := granted(s); n > 0 {
		cli.Note(w, "  %s delayed by a stall of this host\n", fmt.Count(n, "verdict"))
	}
	if text := countsText(s.Counts); text != "" {
		cli.Note(w, "  without effect: %s\n", text)
	}
}

// countsText lists counts in descending order.
func countsText(counts map[string]uint64) string {
	var names []string
	for name, n := range counts {
		if n > 0 {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b)) })
	for i, name := range names {
		names[i] = fmt.Sprintf("%d %s", counts[name], name)
	}
	return strings.Join(names, ", ")
}

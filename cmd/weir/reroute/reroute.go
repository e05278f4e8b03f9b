// SPDX-License-Identifier: Apache-2.0

// Package reroute implements the command weir reroute.
package reroute

import (
	"cmp"
	"errors"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/feature/reroute/audit"
	"github.com/weir-project/weir/feature/reroute/draw"
	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/internal/netns"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/terminal"
)

func init() {
	cli.Add(cli.Feature{
		Name:     reroute.Name,
		Overview: []string{"weir reroute status|links: whether they work, and their traffic's path"},
		Commands: func(g *cli.Globals) []*cobra.Command { return []*cobra.Command{rerouteCommand(g)} },
		Summary: func(w io.Writer, st host.Status, _ bool, _ time.Time) {
			if s, ok := host.Part[reroute.State](st, reroute.Name); ok && !s.Empty() {
				printPaths(w, s)
			}
		},
		Names: map[string]func(host.Status) []string{"PATH": func(st host.Status) (out []string) {
			s, _ := host.Part[reroute.State](st, reroute.Name)
			for _, p := range s.Paths {
				out = append(out, p.Name)
			}
			return out
		}},
	})
}

func rerouteCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "reroute", Short: "Probe links and route around failed ones (SRv6 fast reroute)",
		Long: `Reroute moves traffic off failed links, in the kernel, with SRv6 segment lists
planned in advance. A path is a probed link or route, repaired when it fails.`,
	}
	c.AddCommand(rerouteStatus(g), reroutePlan(g), rerouteDrain(g), rerouteUndrain(g))
	return c
}

// planFlags are the flags of weir reroute plan.
type planFlags struct {
	file, svg, protect string
	sids               string // file
	audit, yaml, apply bool
	allowOutage        bool
	change             string
	sockets            string // directory of the sockets of FRR's daemons
	question           plan.Question
}

func reroutePlan(g *cli.Globals) *cobra.Command {
	var f planFlags
	c := &cobra.Command{
		Use: "plan", Short: "Compute repairs of network failures from a topology", Args: cobra.NoArgs,
		Long: `Compute each router's repair when an adjacent link, neighbour or shared-risk group
fails: the first hop and the shortest list of segments. It takes packets along the
post-convergence path while all other routers still route as before (TI-LFA).
Destinations without protection are listed with the reason. Nothing is changed.

FILE has one of these formats:
  - GraphML (Topology Zoo, networkx)
  - node-link JSON (networkx, topohub)
  - weir's own YAML or JSON, with SIDs and shared risks
  - the output of FRR:
  ` + strings.Replace(topo.ISISCommand, " -c 'show isis database", " \\\n    -c 'show isis database", 1) + `
  ` + topo.OSPF6Command + `

Without --node the output is a summary of all routers. --svg draws the repair with
the longest list, of those selected by --node and --destination.

--sids FILE adds SRv6 SIDs to a topology without them: by a rule, for single
routers, or both. A router's locator is the one in its database (FRR 8.4 has
none), or its announced prefix within locators. A SID is the locator and a
function:
  locators: fc00::/16
  functions: {end: "::e", dt6: "::d6", dt4: "::d4"}
  nodes: [{name: d, end: fc00:4::1, dt6: fc00:4::2}]   # or locator: fc00:4::/48
  links: [{from: d, to: b, endx: fc00:4::b}]

--change down, or up, computes another plan: detours of --node while other routers
learn of a failure, or of its end. They avoid loops between updated and outdated
routers (micro-loops). Each router first uses these lists. It uses its new routes
once all routers are updated.

--yaml prints the repairs of --node as the section reroute of weir.yaml. --apply
installs them on this host, which must be that router. Its other paths stay, and
the paths of an earlier plan are replaced. A later weir apply with another section
replaces them. The topology must have interfaces, prefixes and SIDs. A plan does
not say how to judge a link: add a probe, or bfd, in a path of its own.

--audit compares weir's plan with the FRR of this network namespace, through vtysh.
It reads isisd's backups and their copies in zebra and the kernel. It also reads
weir's repairs in the data path, for these prefixes and for its own paths.`,
		Example: `  weir reroute plan -f core.yaml --node a --destination d
  weir reroute plan -f core.yaml --node a --yaml
  vtysh -c 'show isis hostname' -c 'show isis neighbor detail' \
    -c 'show isis database detail' |
    weir reroute plan -f - --sids sids.yaml --node a --yaml
  weir reroute plan -f Abilene.graphml --protect node --svg repair.svg`,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd, g) },
	}
	c.Flags().StringVarP(&f.file, "file", "f", "", "topology (- for standard input)")
	c.Flags().StringVar(&f.sids, "sids", "", "file of SRv6 SIDs, or of locators and functions, for a topology without them")
	c.Flags().StringVar(&f.question.Node, "node", "", "plan for this router only")
	c.Flags().StringVar(&f.protect, "protect", "link", "kind of failure: link, node or srlg")
	c.Flags().BoolVar(&f.question.Fallback, "fallback", false, "protect the link if the node or group cannot be protected")
	c.Flags().StringVar(&f.question.Destination, "destination", "", "repairs for this router only")
	c.Flags().BoolVar(&f.audit, "audit", false, "compare with FRR's backups and the kernel's routes")
	c.Flags().BoolVar(&f.yaml, "yaml", false, "print the repairs of --node as a section of weir.yaml")
	c.Flags().BoolVar(&f.apply, "apply", false, "install the repairs of --node on this host")
	c.Flags().BoolVar(&f.allowOutage, "allow-outage", false, "with --apply: replace repairs in use even if their packets are then lost")
	c.Flags().StringVar(&f.change, "change", "", "compute detours of --node while a change spreads: down or up")
	c.Flags().StringVar(&f.sockets, "vty-socket", "", "directory of FRR's sockets (default: vtysh's own)")
	c.Flags().StringVar(&f.svg, "svg", "", "draw a repair into this file")
	cli.JSONFlag(c, g)
	return c
}

func (f *planFlags) run(cmd *cobra.Command, g *cli.Globals) error {
	if f.file == "" && !f.audit {
		return cli.Usage(errors.New("name the topology: -f FILE; see weir reroute plan --help"))
	}
	if f.question.Mode = plan.Mode(f.protect); !slices.Contains(plan.Modes(), f.question.Mode) {
		return cli.Usage(fmt.Errorf("--protect %s: want link, node or srlg", f.protect))
	}
	switch f.question.Change = plan.Change(f.change); {
	case f.change != "" && f.change != "down" && f.change != "up":
		return cli.Usage(fmt.Errorf("--change %s: want down or up", f.change))
	case f.change != "" && f.question.Node == "":
		return cli.Usage(errors.New("--change: name the router: --node NODE"))
	case f.change != "" && f.svg != "":
		return cli.Usage(errors.New("--change cannot be drawn: leave --svg out"))
	}
	if (f.yaml || f.apply) && (f.question.Node == "" || f.change != "" || f.audit) {
		return cli.Usage(errors.New("--yaml and --apply: name the router with --node NODE, and leave --change and --audit out"))
	}
	switch {
	case f.apply && f.question.Destination != "":
		return cli.Usage(errors.New("--apply: repairs for one destination would replace the whole plan: leave --destination out"))
	case (f.yaml || f.apply) && g.JSON:
		return cli.Usage(errors.New("--json cannot be combined with --yaml or --apply: leave one out"))
	}
	line := cli.Reading(cmd, cmp.Or(f.file, "the topology from FRR"))
	defer line.Stop()
	n, err := f.read(cmd.InOrStdin())
	if err != nil {
		return err
	}
	line.Step(fmt.Sprintf("planning repairs of %d routers", len(n.Nodes)))
	f.question.Progress = func(done, total int) { line.Of(int64(done), int64(total)) }
	if f.audit {
		return f.runAudit(cmd, g, n, line)
	}
	f.question.Summary = f.question.Node == "" && f.question.Destination == "" && !g.JSON
	a, err := plan.Ask(n, f.question)
	line.Stop()
	if err != nil {
		return err
	}
	if f.svg != "" {
		row, ok := a.Longest()
		if !ok {
			return errors.New("no repair to draw")
		}
		if err := os.WriteFile(f.svg, draw.Repair(a, row), 0o644); err != nil {
			return err
		}
	}
	if f.yaml || f.apply {
		return f.install(cmd, g, a)
	}
	if g.JSON {
		return cli.PrintJSON(cmd, a)
	}
	printPlan(cmd.OutOrStdout(), a, f.question.Summary)
	return nil
}

// install puts a plan in force (--apply), or prints it as a section of weir.yaml (--yaml).
func (f *planFlags) install(cmd *cobra.Command, g *cli.Globals, a *plan.Answer) error {
	paths, notes, err := reroute.Planned(a)
	if err != nil {
		return err
	}
	for _, n := range notes {
		fmt.Fprintln(cmd.ErrOrStderr(), "not installed:", n)
	}
	if f.yaml {
		text, err := reroute.PlannedYAML(paths)
		if err != nil {
			return err
		}
		if _, err := cmd.OutOrStdout().Write(text); err != nil {
			return err
		}
	}
	if !f.apply {
		return nil
	}
	l, err := g.Host().Root.Lock(cmd.Context())
	if err != nil {
		return err
	}
	defer l.Unlock()
	done, err := reroute.Install(cmd.Context(), l, paths, f.allowOutage)
	for _, s := range done {
		fmt.Fprintln(cmd.ErrOrStderr(), s)
	}
	if err == nil && len(done) == 0 {
		fmt.Fprintln(cmd.ErrOrStderr(), "nothing to change: the plan is in force")
	}
	return err
}

func (f *planFlags) runAudit(cmd *cobra.Command, g *cli.Globals, n *topo.Network, line *terminal.Line) error {
	if f.question.Node != "" {
		n.Self = f.question.Node
	}
	here, err := netns.Current()
	if err != nil {
		return err
	}
	defer here.Close()
	own, err := protect.ReadNamespace(g.Host().Root, here)
	if err != nil {
		return err
	}
	r, err := audit.Run(audit.Local(f.sockets), n, f.question.Options, own.Paths)
	line.Stop()
	if err != nil {
		return err
	}
	if g.JSON {
		return cli.PrintJSON(cmd, r)
	}
	printAudit(cmd.OutOrStdout(), r)
	return nil
}

func printAudit(w io.Writer, r *audit.Report) {
	backups := 0
	for _, row := range r.Rows {
		backups += min(1, len(row.Backup))
	}
	fmt.Fprintf(w, "%s: isisd shows backups for %s; zebra has %d of them, the kernel %d; weir's data path has repairs for %s\n",
		r.Router, fmt.Count(backups, "prefix"), r.InZebra, r.InKernel, fmt.Count(r.InWeir, "prefix"))
	if len(r.Rows) == 0 {
		return
	}
	printAuditRows(w, r.Rows)
}

func printAuditRows(w io.Writer, all []audit.Row) {
	type row struct {
		Prefix  netip.Prefix `table:"PREFIX"`
		Backup  string       `table:"ISISD BACKUP"`
		Zebra   string       `table:"ZEBRA"`
		Kernel  string       `table:"KERNEL"`
		Has     string       `table:"WEIR REPAIR"`
		Planned string       `table:"WEIR PLAN"`
	}
	var rows []row
	for _, of := range all {
		var backups, has, planned []string
		for _, b := range of.Backup {
			backups = append(backups, strings.TrimSpace(b.Interface+" "+b.Labels))
		}
		for _, i := range of.Weir {
			has = append(has, installedText(i))
		}
		for _, p := range of.Planned {
			planned = append(planned, fmt.Sprintf("without %s: %s", p.Failure, strings.Join(append([]string{p.Out}, p.Segments...), ", ")))
		}
		kernel := yes(of.Kernel)
		if !of.Route {
			kernel = "no route at all"
		}
		rows = append(rows, row{of.Prefix, cmp.Or(strings.Join(backups, "; "), "none"), yes(of.Zebra), kernel,
			cmp.Or(strings.Join(has, "; "), "nothing"), strings.Join(planned, "; ")})
	}
	cli.PrintRows(w, rows, time.Time{})
}

// installedText describes the path of packets if a link failed now.
func installedText(i audit.Installed) string {
	var ways []string
	for _, r := range i.Repairs {
		way := "by " + r.Device
		if r.Down {
			way += " (down as well)"
		}
		ways = append(ways, way)
	}
	text := fmt.Sprintf("without %s: %s", i.Link, cmp.Or(strings.Join(ways, ", else "), "no repair in force"))
	switch {
	case !i.Attached:
		text += ", not attached"
	case i.Shadow:
		text += ", shadow only"
	case len(i.Problems) > 0:
		text += ", other repairs are not in force: weir reroute status " + i.Path
	}
	return text
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// read reads the topology and adds the SIDs of --sids.
func (f *planFlags) read(stdin io.Reader) (*topo.Network, error) {
	n, err := f.topology(stdin)
	if err != nil || f.sids == "" {
		return n, err
	}
	s, err := topo.ReadSIDs(f.sids)
	if err != nil {
		return nil, err
	}
	return n, s.AddTo(n)
}

func (f *planFlags) topology(stdin io.Reader) (*topo.Network, error) {
	switch f.file {
	case "":
		return audit.Topology(audit.Local(f.sockets))
	case "-":
	default:
		return topo.ReadFile(f.file)
	}
	data, err := io.ReadAll(stdin)
	if err != nil {
		return nil, err
	}
	return topo.Read("standard input", data)
}

func printPlan(w io.Writer, a *plan.Answer, summary bool) {
	what := "repairs"
	if a.Change != plan.None {
		what = "detours"
	}
	repairs, unprotected := 0, 0
	for _, r := range a.Routers {
		repairs += r.Repairs
		unprotected += r.Unprotected
	}
	fmt.Fprintf(w, "%s: %s, %s; %d %s, %d unprotected, against failures of a %s\n", a.Network, fmt.Count(a.Nodes, "node"), fmt.Count(a.Links, "link"),
		repairs, what, unprotected, map[plan.Mode]string{plan.Link: "link", plan.Node: "node", plan.SRLG: "shared-risk group"}[a.Mode])
	for _, note := range a.Notes {
		fmt.Fprintln(w, "note:", note)
	}
	if summary {
		printPlanSummary(w, a)
		return
	}
	if len(a.Repairs) > 0 {
		printRepairs(w, a.Repairs)
	}
	if len(a.Unprotected) > 0 {
		type row struct {
			Node        string      `table:"NODE"`
			Failure     string      `table:"FAILURE"`
			Destination string      `table:"UNPROTECTED"`
			Reason      plan.Reason `table:"REASON"`
		}
		var rows []row
		for _, u := range a.Unprotected {
			rows = append(rows, row{u.Node, u.Failure, u.Destination, u.Reason})
		}
		cli.PrintRows(w, rows, time.Time{})
	}
}

func printRepairs(w io.Writer, repairs []plan.RepairRow) {
	type row struct {
		Node        string `table:"NODE"`
		Failure     string `table:"FAILURE"`
		Destination string `table:"DESTINATION"`
		Out         string `table:"OUT"`
		Segments    string `table:"SEGMENTS"`
		Metric      uint64 `table:"METRIC"`
	}
	var rows []row
	for _, r := range repairs {
		rows = append(rows, row{r.Node, r.Failure, r.Destination, r.Out, segmentList(r), r.Metric})
	}
	cli.PrintRows(w, rows, time.Time{})
}

// segmentList formats the segments, and the SIDs of the header if they are known.
func segmentList(r plan.RepairRow) string {
	text := strings.Join(r.Segments, ", ")
	if len(r.SIDs) > 0 {
		var sids []string
		for _, s := range r.SIDs {
			sids = append(sids, s.String())
		}
		text += " [" + strings.Join(sids, " ") + "]"
	}
	if r.Problem != "" {
		text += " (" + r.Problem + ")"
	}
	if text == "" {
		return "-"
	}
	return text
}

func printPlanSummary(w io.Writer, a *plan.Answer) {
	type row struct {
		Node        string `table:"NODE"`
		None        int    `table:"NO SEGMENT"`
		One         int    `table:"1"`
		Two         int    `table:"2"`
		More        int    `table:"3+"`
		Unprotected int    `table:"UNPROTECTED"`
	}
	var rows []row
	for _, r := range a.Routers {
		var by [4]int
		for length, count := range r.Segments {
			by[min(length, 3)] += count
		}
		rows = append(rows, row{r.Node, by[0], by[1], by[2], by[3], r.Unprotected})
	}
	cli.PrintRows(w, rows, time.Time{})
}

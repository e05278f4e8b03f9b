// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"cmp"
	"errors"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

func filterExplain(g *cli.Globals) *cobra.Command {
	hook := filter.HookTCX
	lists := listValue{}
	c := &cobra.Command{
		Use: "explain EXPR", Short: "Show the compiled program of an expression", Args: cobra.ExactArgs(1),
		Long: `Show how weir parses an expression, and the compiled program for a hook. Nothing
is loaded or attached.`,
		Example: `  weir filter explain 'udp.dstport == 53 and ip.src in {192.0.2.0/24}'
  weir filter explain 'tcp.flags & 0x12' --hook xdp`,
		RunE: func(cmd *cobra.Command, args []string) error {
			x, err := filter.Explain(args[0], hook, lists)
			if err != nil {
				return usageIfExpression(err)
			}
			if g.JSON {
				return cli.PrintJSON(cmd, x)
			}
			out := cmd.OutOrStdout()
			for _, line := range x.Program {
				fmt.Fprintln(out, line)
			}
			for _, m := range x.Maps {
				fmt.Fprintln(out, "map", m)
			}
			return nil
		},
	}
	hookFlag(c, &hook)
	listFlag(c, lists)
	cli.JSONFlag(c, g)
	return c
}

func usageIfExpression(err error) error {
	if filter.IsExpressionError(err) {
		return cli.Usage(err)
	}
	return err
}

// hookValue is a flag with a hook name.
type hookValue struct{ to *filter.Hook }

func (h hookValue) String() string {
	if h.to == nil {
		return ""
	}
	return string(*h.to)
}
func (h hookValue) Type() string { return "hook" }
func (h hookValue) Set(s string) error {
	if s == string(filter.HookSocket) { // valid here, but not in a configuration
		*h.to = filter.HookSocket
		return nil
	}
	if err := h.to.UnmarshalText([]byte(s)); err != nil {
		return fmt.Errorf("%w, %s", err, filter.HookSocket)
	}
	return nil
}

func hookFlag(c *cobra.Command, to *filter.Hook) {
	c.Flags().Var(hookValue{to}, "hook", "xdp, xdp-generic, tcx, clsact, netfilter, nft or socket")
}

// listValue is a repeatable flag: NAME=FILE for each list.
type listValue map[string]string

func (l listValue) String() string { return "" }
func (l listValue) Type() string   { return "NAME=FILE" }
func (l listValue) Set(s string) error {
	name, file, _ := strings.Cut(s, "=")
	if name = strings.TrimPrefix(name, "$"); name == "" || file == "" {
		return errors.New("want NAME=FILE, as in bogons=bogons.txt")
	}
	l[name] = file
	return nil
}

func listFlag(c *cobra.Command, to listValue) {
	c.Flags().Var(to, "list", "file with the prefixes of list $NAME (repeatable)")
}

// triedFilter is the result of one filter over a capture.
type triedFilter struct {
	Name string `json:"name,omitempty"`
	filter.TrialResult
}

func filterTest(g *cli.Globals) *cobra.Command {
	var capture, config, name string
	lists := listValue{}
	var interpret bool
	c := &cobra.Command{
		Use: "test EXPR… -r FILE", Short: "Evaluate expressions, or a configuration's rules, on a capture",
		Long: `Evaluate expressions on every packet of a capture (pcap or pcapng, also gzipped; -
for standard input). Each expression is counted by itself. With --rules the
filters of a configuration file are evaluated, up to the first deciding rule.
Nothing is attached.

For root, the kernel runs the program of the filter. For other users, and for
expressions with a rate, an interpreter evaluates. Fields of the link layer are
absent if the capture has none.

Packets cut by a snaplen are decided by their captured bytes. Lengths are wire
lengths. If missing bytes decide, the packet is counted as UNDECIDED, and the
rules after a possibly deciding rule are not evaluated.`,
		Example: `  weir filter test 'udp.dstport == 53' 'tcp.flags.syn == 1' -r trace.pcap
  weir filter test --rules weir.yaml --filter sip -r trace.pcapng --json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			filters, err := filtersToTry(args, config, name)
			if err != nil {
				return err
			}
			if config == "" {
				filters[0].Lists = lists
			}
			// Show the packets before a truncation, and then the error.
			tried, err := tryCapture(cmd, filters, capture, interpret)
			if tried == nil {
				return err
			}
			if g.JSON {
				return errors.Join(cli.PrintJSON(cmd, tried), err)
			}
			for i, t := range tried {
				if i > 0 {
					fmt.Fprintln(cmd.OutOrStdout())
				}
				printTried(cmd.OutOrStdout(), t)
			}
			return err
		},
	}
	c.Flags().StringVarP(&capture, "read", "r", "", "capture to read, pcap or pcapng, also gzipped; - for standard input")
	c.Flags().StringVar(&config, "rules", "", "configuration file with the filters to evaluate")
	c.Flags().StringVar(&name, "filter", "", "evaluate only this filter of the configuration")
	c.Flags().BoolVar(&interpret, "interpret", false, "use the interpreter even if the kernel could run the program")
	listFlag(c, lists)
	cli.JSONFlag(c, g)
	c.MarkFlagFilename("read", "pcap", "pcapng", "cap", "gz")
	c.MarkFlagFilename("rules", "yaml", "yml")
	c.Args = func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) == 0 && config == "":
			return errors.New("name an expression, or a configuration with --rules")
		case len(args) > 0 && config != "":
			return errors.New("either expressions or --rules, not both")
		case config == "" && name != "":
			return errors.New("--filter is for a configuration: name it with --rules")
		case config != "" && len(lists) > 0:
			return errors.New("--list is for expressions: a configuration names its own lists")
		case capture == "":
			return errors.New("name the capture: -r FILE")
		}
		return nil
	}
	return c
}

// filtersToTry returns the filters of a configuration, or one filter with a counting rule for each expression.
func filtersToTry(exprs []string, config, name string) ([]filter.Filter, error) {
	if config == "" {
		f := filter.Filter{Hook: filter.HookTCX, Default: filter.Pass}
		for _, e := range exprs {
			f.Rules = append(f.Rules, filter.Rule{Match: filter.Expression{Text: e}, Action: filter.Count})
		}
		return []filter.Filter{f}, nil
	}
	c, err := host.LoadConfig(config)
	if err != nil {
		return nil, err
	}
	var out []filter.Filter
	spec, _ := filter.Feature{}.Spec(c.Document())
	for _, f := range spec.Filters {
		if name == "" || f.Name == name {
			out = append(out, f)
		}
	}
	if len(out) == 0 && name == "" {
		return nil, fmt.Errorf("%s has no filter: its filter: section is a list of them", config)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s has no filter %s: its filter: section is a list of them", config, name)
	}
	return out, nil
}

// tryCapture reads a capture once, for all filters. On a read error it returns the results of the packets before the
// error.
func tryCapture(cmd *cobra.Command, filters []filter.Filter, capture string, interpret bool) (out []triedFilter, err error) {
	var trials []*filter.Trial
	for _, f := range filters {
		t, err := filter.NewTrial(f, interpret)
		if err != nil {
			return nil, usageIfExpression(err)
		}
		defer t.Close()
		trials = append(trials, t)
	}
	in := cmd.InOrStdin()
	if capture != "-" {
		file, err := os.Open(capture)
		if err != nil {
			return nil, fmt.Errorf("open capture: %w", err)
		}
		defer file.Close()
		in = file
	}
	line := cli.Reading(cmd, capture)
	unread := filter.ReadCapture(line.Reader(in), trials...)
	line.Stop()
	if unread != nil && !errors.Is(unread, filter.ErrCutShort) {
		return nil, usageIfExpression(fmt.Errorf("%s: %w", capture, unread))
	}
	for i, t := range trials {
		r, err := t.Result()
		if err != nil {
			return nil, err
		}
		out = append(out, triedFilter{filters[i].Name, r})
	}
	if unread != nil {
		unread = fmt.Errorf("%s: %w", capture, unread)
	}
	return out, unread
}

// printOdd reports records that are not whole packets.
func printOdd(w io.Writer, r filter.TrialResult) {
	if r.Skipped > 0 {
		fmt.Fprintf(w, "%s skipped: unknown link type (%s)\n", fmt.Count(r.Skipped, "packet"), strings.Join(r.SkippedLink, ", "))
	}
	if r.Cut > 0 {
		fmt.Fprintf(w, "%s cut by the capture's snaplen: lengths are those on the wire\n", fmt.Count(r.Cut, "packet"))
	}
	if r.Undecided > 0 {
		fmt.Fprintf(w, "%s undecided: a rule needs bytes beyond the snaplen; capture whole packets (tcpdump -s 0)\n", fmt.Count(r.Undecided, "packet"))
	}
	if r.Odd > 0 {
		fmt.Fprintf(w, "%d odd records, longer than their packets on the wire: all their bytes are used\n", r.Odd)
	}
	if r.Empty > 0 {
		fmt.Fprintf(w, "%s: packets of no bytes\n", fmt.Count(r.Empty, "empty record"))
	}
}

func printTried(w io.Writer, t triedFilter) {
	if t.Name != "" {
		fmt.Fprintf(w, "filter %s\n", t.Name)
	}
	fmt.Fprintf(w, "%s, by the %s", fmt.Count(t.Packets, "packet"), t.Engine)
	if t.Reason != "" {
		fmt.Fprintf(w, " (%s)", t.Reason)
	}
	if t.Interpreted > 0 && t.Engine == "kernel" {
		fmt.Fprintf(w, " (%d by the interpreter, because the kernel rejects them)", t.Interpreted)
	}
	fmt.Fprintln(w)
	printOdd(w, t.TrialResult)
	type row struct {
		Name      string        `table:"RULE"`
		Action    filter.Action `table:"ACTION"`
		Packets   uint64        `table:"PACKETS"`
		Bytes     uint64        `table:"BYTES,bytes"`
		Undecided uint64        `table:"UNDECIDED,omitzero"`
		Match     string        `table:"MATCH"`
	}
	var rows []row
	add := func(name string, r filter.RuleState, match string) {
		rows = append(rows, row{name, r.Action, r.Packets, r.Bytes, r.Undecided, match})
	}
	for i, r := range t.Rules {
		add(cmp.Or(r.Name, fmt.Sprint(i+1)), r, r.Match)
	}
	if t.Name != "" { // expressions alone have no default
		add("default", t.Default, "no rule decided")
	}
	cli.PrintRows(w, rows, time.Time{})
}

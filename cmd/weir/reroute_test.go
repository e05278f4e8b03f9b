// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/audit"
	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/protect"
)

func TestReroutePlan(t *testing.T) {
	var got strings.Builder
	for _, line := range []string{
		"", "--node a", "--node a --destination f --protect node", "--node a --protect srlg", "--protect node --fallback --node a --destination b", "--node aa",
		"--node e --change up --destination a", "--node e --change down --destination a",
	} {
		out, err := inProcess(append([]string{"reroute", "plan", "-f", "testdata/core.yaml"}, strings.Fields(line)...)...)
		fmt.Fprintf(&got, "$ weir reroute plan -f core.yaml %s\n%s", line, out)
		if err != nil {
			fmt.Fprintf(&got, "weir: %v\nstatus %d\n", err, exitStatus(err))
		}
		got.WriteByte('\n')
	}
	golden(t, "reroute-plan.golden", got.String())
}

func TestReroutePlanJSON(t *testing.T) {
	svg := filepath.Join(t.TempDir(), "repair.svg")
	out, err := inProcess("reroute", "plan", "-f", "testdata/core.yaml", "--json", "--svg", svg)
	var a plan.Answer
	if err != nil || json.Unmarshal([]byte(out), &a) != nil || a.Nodes != 6 || len(a.Repairs) == 0 || len(a.Repairs[0].Path) < 2 {
		t.Errorf("%v: %s", err, out)
	}
	if picture, err := os.ReadFile(svg); err != nil || !strings.HasPrefix(string(picture), "<svg ") {
		t.Errorf("%v: %.100s", err, picture)
	}
}

// A topology may come from a pipe, as from vtysh.
func TestReroutePlanFromPipe(t *testing.T) {
	text, err := os.ReadFile("testdata/core.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c := command("reroute", "plan", "-f", "-", "--node", "a")
	c.Stdin = strings.NewReader(string(text))
	if out, stderr, status := finish(t, c); status != 0 || !strings.Contains(out, "fc00:d::e1") {
		t.Errorf("status %d: %s%s", status, out, stderr)
	}
}

// What the command says of a router whose isisd has computed backups.
func TestPrintAudit(t *testing.T) {
	var got strings.Builder
	printAudit(&got, &audit.Report{Router: "a", InZebra: 2, InWeir: 1, Rows: []audit.Row{
		{Prefix: netip.MustParsePrefix("fd00:9::4/128"), Zebra: true, Backup: []audit.NextHop{{Interface: "ab0", Labels: "16103/15003"}, {Interface: "ab1", Labels: "16103/15003"}}},
		{Prefix: netip.MustParsePrefix("fd00:3::/64"), Zebra: true, Route: true, Backup: []audit.NextHop{{Interface: "ad"}},
			Planned: []audit.Planned{{Failure: "a→b", Out: "a→d", Segments: []string{"c"}}},
			Weir:    []audit.Installed{{Path: "far", Link: "ab", Attached: true, Repairs: []protect.RepairState{{Device: "ad"}, {Device: "ac", Down: true}}}}},
		{Prefix: netip.MustParsePrefix("fd00:77::/64"), Route: true, Weir: []audit.Installed{{Path: "own", Link: "ab", Attached: true, Problems: []string{"no route"}}, {Path: "own2", Link: "ac"}}},
	}})
	golden(t, "reroute-audit.golden", got.String())
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/audit"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
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

// What isisd of Debian prints of a square has no SIDs: a file gives them, and says where it is wrong.
func TestReroutePlanSIDs(t *testing.T) {
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "sids.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	isis, err := filepath.Abs("../../feature/reroute/topo/testdata/isis-square.txt")
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"reroute", "plan", "-f", isis, "--node", "a"}
	for text, want := range map[string]string{
		"": "no SIDs",
		"locators: fc00::/16\nfunctions: {end: '::e', dt6: '::d6', dt4: '::d4'}\n": "",
		"nodes: [{name: d, end: 'fc00:4::e', dt46: 'fc00:4::46'}]\n":               "",
	} {
		var sids []string
		if text != "" {
			sids = []string{"--sids", file(text)}
		}
		out, notes, status := weir(t, slices.Concat(args, []string{"--yaml"}, sids)...)
		if status != 0 || strings.Contains(notes, "b without a→b (eth1): the topology has no SIDs: give them beside it (weir reroute plan --sids FILE)") != (want != "") {
			t.Errorf("%q: status %d\n%s", text, status, notes)
		}
		if strings.Contains(out, "fd00:f2::/64") != (want == "") || strings.Contains(out, "segments4: ['fc00:4::") != (want == "") {
			t.Errorf("%q: the traffic of the link\n%s", text, out)
		}
	}
	if _, err := inProcess(slices.Concat(args, []string{"--sids", file("nodes: [{name: x, end: 'fc00::1'}]")})...); err == nil || !strings.Contains(err.Error(), "sids.yaml:1:9: there is no node") {
		t.Errorf("of a router that is not there: %v", err)
	}
	if _, err := inProcess(slices.Concat(args, []string{"--sids", filepath.Join(t.TempDir(), "none")})...); err == nil {
		t.Error("a file that is not there")
	}
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

// Packets with another key are told of beside a session that does not come up.
func TestBFDNotAuthentic(t *testing.T) {
	var out strings.Builder
	printBFD(&out, []peers.SessionState{{Name: "core-a", State: bfd.Down, NotAuthentic: 28}, {Name: "core-b", State: bfd.Up, NotAuthentic: 1}}, false)
	if got := out.String(); !strings.Contains(got, "core-a: 28 packets of the peer are refused") || strings.Contains(got, "core-b: 1") {
		t.Errorf("%s", got)
	}
}

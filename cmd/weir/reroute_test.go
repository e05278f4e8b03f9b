// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/plan"
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

// The output of Debian's isisd for a square has no SIDs. A file adds them, and errors in the file have positions.
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

// A topology may be read from a pipe, for example from vtysh.
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

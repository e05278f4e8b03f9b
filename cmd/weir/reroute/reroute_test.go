// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"flag"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/audit"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/protect"
)

var update = flag.Bool("update", false, "write the golden file anew")

// The report about a router whose isisd has computed backups.
func TestPrintAudit(t *testing.T) {
	var got strings.Builder
	printAudit(&got, &audit.Report{Router: "a", InZebra: 2, InWeir: 1, Rows: []audit.Row{
		{Prefix: netip.MustParsePrefix("fd00:9::4/128"), Zebra: true, Backup: []audit.NextHop{{Interface: "ab0", Labels: "16103/15003"}, {Interface: "ab1", Labels: "16103/15003"}}},
		{Prefix: netip.MustParsePrefix("fd00:3::/64"), Zebra: true, Route: true, Backup: []audit.NextHop{{Interface: "ad"}},
			Planned: []audit.Planned{{Failure: "a→b", Out: "a→d", Segments: []string{"c"}}},
			Weir:    []audit.Installed{{Path: "far", Link: "ab", Attached: true, Repairs: []protect.RepairState{{Device: "ad"}, {Device: "ac", Down: true}}}}},
		{Prefix: netip.MustParsePrefix("fd00:77::/64"), Route: true, Weir: []audit.Installed{{Path: "own", Link: "ab", Attached: true, Problems: []string{"no route"}}, {Path: "own2", Link: "ac"}}},
	}})
	const file = "testdata/audit.golden"
	if *update {
		if err := os.WriteFile(file, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("got\n%s\nwant\n%s", &got, want)
	}
}

// Packets with another key are reported for a session stuck in Down.
func TestBFDNotAuthentic(t *testing.T) {
	var out strings.Builder
	printBFD(&out, []peers.SessionState{{Name: "core-a", State: bfd.Down, NotAuthentic: 28}, {Name: "core-b", State: bfd.Up, NotAuthentic: 1}}, false)
	if got := out.String(); !strings.Contains(got, "core-a: 28 packets of the peer rejected as not authentic") || strings.Contains(got, "core-b: 1") {
		t.Errorf("%s", got)
	}
}

// SPDX-License-Identifier: Apache-2.0

package topo_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/topo"
)

const withoutSIDs = `nodes:
  - {name: a, prefixes: [fc00:1::/32, 'fc00:1::1/128', 'fd00:1::/64']}
  - {name: b, prefixes: [fc00:2::/32], end: fc00:2::77}
  - {name: c, prefixes: [fc00:3::/32, fc00:33::/32]}
  - {name: d, prefixes: [10.4.0.0/24]}
links:
  - {from: a, to: b, interface: eth1, address: 'fd00:12::1'}
  - {from: a, to: b, interface: eth2, address: 'fd00:21::1'}
  - {from: c, to: d}
`

// SIDs can be given beside a topology: by locators and functions, per router, and for links.
func TestSIDsBeside(t *testing.T) {
	for _, c := range []struct {
		name, sids, want string // want is SIDs of nodes and links, or part of an error
	}{
		{"a rule", "locators: fc00::/16\nfunctions:\n  end: ::e\n  dt6: ::d6\n  dt4: ::d4\nnodes: [{name: c, locator: 'fc00:33::/32'}]",
			"a fc00:1::e fc00:1::d6 fc00:1::d4; b fc00:2::77 fc00:2::d6 fc00:2::d4; c fc00:33::e fc00:33::d6 fc00:33::d4; "},
		{"its functions stand in the middle", "locators: fc00::/16\nfunctions: {end: '0:0:e::'}\nnodes: [{name: c, locator: 'fc00:3::/32'}]",
			"a fc00:1:e:: - -; b fc00:2::77 - -; c fc00:3:e:: - -; "},
		{"End.DT46 is both", "locators: fc00::/16\nfunctions: {end: '::e', dt46: '::46'}\nnodes: [{name: c, end: 'fc00:3::1', dt4: 'fc00:3::4', locator: 'fc00:3::/32'}]",
			"a fc00:1::e fc00:1::46 fc00:1::46; b fc00:2::77 fc00:2::46 fc00:2::46; c fc00:3::1 fc00:3::46 fc00:3::4; "},
		{"router by router", "nodes:\n  - {name: a, end: fc00:1::1, dt6: fc00:1::6}\nlinks:\n  - {from: a, to: b, interface: eth2, endx: fc00:1::b2, dx6: fc00:1::b6}\n  - {from: d, to: c, endx: fc00:4::c}",
			"a fc00:1::1 fc00:1::6 -; b fc00:2::77 - -; a→b (eth2) fc00:1::b2 fc00:1::b6; d→c fc00:4::c -; "},
		{"by an address", "links: [{from: a, to: b, address: 'fd00:12::1', endx: 'fc00:1::b'}]", "b fc00:2::77 - -; a→b (eth1) fc00:1::b -; "},

		{"nothing", "locators: fc00::/16", "sids:1:1: no SIDs: give functions"},
		{"no functions", "functions: {}", "sids:1:12: functions: none is given"},
		{"no locators", "functions: {end: '::e'}", "sids:1:12: functions: the topology names no locator"},
		{"others' locators", "locators: fd99::/16\nfunctions: {end: '::e'}", "locators: no router announces a locator in fd99::/16"},
		{"of IPv4", "locators: 10.0.0.0/8\nfunctions: {end: '::e'}", "want an IPv6 prefix"},
		{"several", "locators: fc00::/16\nfunctions: {end: '::e'}", "c announces several prefixes in fc00::/16 (fc00:3::/32, fc00:33::/32): say which is its locator: nodes: [{name: c, locator: fc00:3::/32}]"},
		{"the locator of another", "locators: fc00::/16\nfunctions: {end: '::e'}\nnodes: [{name: c, locator: 'fc00:1::/32'}]", "a and c both announce fc00:1::/32"},
		{"a function of a locator's bits", "locators: fc00::/16\nfunctions: {end: 'fc00:9::e'}\nnodes: [{name: c, locator: 'fc00:3::/32'}]", "fc00:9::e has bits within the first 32"},
		{"IPv4", "nodes: [{name: a, end: 10.0.0.1}]", "sids:1:24: node a: end: 10.0.0.1 is no SID"},
		{"no such node", "nodes:\n  - {name: aa, end: fc00:1::1}", `sids:2:5: there is no node "aa" in the topology: there is a, b, c, d`},
		{"twice", "nodes: [{name: a, end: 'fc00:1::1'}, {name: a, end: 'fc00:1::2'}]", "node a is listed twice"},
		{"a key", "nodes: [{name: a, ende: 'fc00:1::1'}]", `did you mean "end"?`},
		{"a locator without functions", "nodes: [{name: a, locator: 'fc00:1::/32'}]", "SIDs follow from it by functions"},
		{"parallel links", "links: [{from: a, to: b, endx: 'fc00:1::b'}]", "2 links from a to b: tell them apart"},
		{"one SID twice", "nodes:\n  - {name: a, end: 'fc00:1::1'}\n  - {name: c, dt6: 'fc00:1::1'}", "sids:3:20: dt6 of node c has the SID fc00:1::1, as has the end of node a"},
		{"one SID of a node and a link", "nodes: [{name: a, end: 'fc00:1::1'}]\nlinks:\n  - {from: d, to: c, endx: 'fc00:1::1'}", "sids:3:28: endx of link d→c has the SID "},
		{"a SID of the topology", "nodes: [{name: a, end: 'fc00:2::77'}]", "sids:1:1: end of node b has the SID fc00:2::77, as has the end of node a"},
		{"no such link", "links: [{from: a, to: c, endx: 'fc00:1::b'}]", "the topology has no such link from a to c"},
	} {
		n, err := topo.Read("net", []byte(withoutSIDs))
		if err != nil {
			t.Fatal(err)
		}
		s, err := topo.ParseSIDs("sids", []byte(c.sids))
		if err == nil {
			err = s.AddTo(n)
		}
		got := sidsOf(n)
		if err != nil {
			got = err.Error()
		}
		if got != c.want && (err == nil || !strings.Contains(got, c.want)) {
			t.Errorf("%s: %s\nwant %s", c.name, got, c.want)
		}
	}
	path := filepath.Join(t.TempDir(), "sids.yaml")
	if err := os.WriteFile(path, []byte("nodes: [{name: a, end: 'fc00:1::1'}]"), 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := topo.ReadSIDs(path); err != nil || len(s.Nodes) != 1 {
		t.Errorf("%+v, %v", s, err)
	}
}

// sidsOf formats a network's SIDs: End, End.DT6 and End.DT4 of routers, End.X and End.DX6 of links.
func sidsOf(n *topo.Network) (out string) {
	text := func(all ...fmt.Stringer) (out string) {
		for _, a := range all {
			out += " " + strings.Replace(a.String(), "invalid IP", "-", 1)
		}
		return out
	}
	for _, x := range n.Nodes {
		if s := text(x.End, x.DT6, x.DT4); s != " - - -" {
			out += x.Name + s + "; "
		}
	}
	for i, l := range n.Links {
		if s := text(l.EndX, l.DX6); s != " - -" {
			out += n.LinkName(i) + s + "; "
		}
	}
	return out
}

// Locators and End SIDs as printed by FRR 10 (isisd's topotest isis_srv6_topo1). Missing SIDs follow from the
// locator.
func TestISISLocators(t *testing.T) {
	text, err := os.ReadFile("testdata/isis.txt")
	if err != nil {
		t.Fatal(err)
	}
	lsp := func(i int, more string) string {
		return fmt.Sprintf("  SRv6 Locator: fc00:%d::/48 (Metric: 0) ipv6-unicast\n    Sub-TLVs:\n      SRv6 End SID Endpoint Behavior: uN PSP/USD, SID value: fc00:%d::\n        Sub-Sub-TLVs:\n          SRv6 SID Structure Locator Block length: 32, Locator Node length: 16, Function length: 0, Argument length: 80,\n", i, i) + more
	}
	data := string(text)
	for i, name := range []string{"a", "b", "c"} {
		more := ""
		if name == "c" {
			more = "      SRv6 End SID Endpoint Behavior: uDT6, SID value: fc00:3:d6::\n      SRv6 End SID Endpoint Behavior: End.DT4, SID value: fc00:3:d4::\n"
		}
		hostname := "  Hostname: " + name + "\n"
		data = strings.Replace(data, hostname, hostname+lsp(i+1, more), 1)
	}
	n, err := topo.Read("isis", []byte(data))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := sidsOf(n), "a fc00:1:: - -; b fc00:2:: - -; c fc00:3:: fc00:3:d6:: fc00:3:d4::; "; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	s, err := topo.ParseSIDs("sids", []byte("functions: {dt6: '0:0:0:d6::', dt4: '0:0:0:d4::'}"))
	if err == nil {
		err = s.AddTo(n)
	}
	if got, want := sidsOf(n), "a fc00:1:: fc00:1:0:d6:: fc00:1:0:d4::; b fc00:2:: fc00:2:0:d6:: fc00:2:0:d4::; c fc00:3:: fc00:3:d6:: fc00:3:d4::; "; err != nil || got != want {
		t.Errorf("%v: %s, want %s", err, got, want)
	}
}

// SPDX-License-Identifier: Apache-2.0

package topo_test

import (
	"os"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/topo"
)

// A neighbour chooses its hostname. An invalid one is replaced by the system id, and the network is read.
func TestOddHostname(t *testing.T) {
	b, err := os.ReadFile("testdata/isis.txt")
	if err != nil {
		t.Fatal(err)
	}
	odd := strings.NewReplacer("0000.0000.0002 b", "0000.0000.0002 b\x1b", "\nb.00-", "\nb\x1b.00-", "Hostname: b\n", "Hostname: b\x1b\n")
	want, err := topo.Read("isis", b)
	if err != nil {
		t.Fatal(err)
	}
	got, err := topo.Read("isis", []byte(odd.Replace(string(b))))
	if err != nil {
		t.Fatal(err)
	}
	if got.Node("0000.0000.0002") < 0 || len(got.Nodes) != len(want.Nodes) || len(got.Links) != len(want.Links) {
		t.Errorf("%d nodes, %d links: %+v", len(got.Nodes), len(got.Links), got.Nodes)
	}
}

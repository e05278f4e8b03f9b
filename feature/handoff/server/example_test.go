// SPDX-License-Identifier: Apache-2.0

package server

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/front"
)

// The examples are files that the agents take.
func TestExampleFiles(t *testing.T) {
	const dir = "../../../examples/handoff/"
	f, err := front.LoadConfig(dir + "front.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s, err := LoadConfig(dir + "server.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if s.Front.Address != f.Listen || s.TLS.Signers != f.TLS.Signers {
		t.Errorf("the server's file does not fit the load balancer's: %+v, %s", s.Front, f.Listen)
	}
}

// So are those of two load balancers, and the daemons take theirs.
func TestExamplePair(t *testing.T) {
	const dir = "../../../examples/handoff/"
	f, err := front.LoadConfig(dir + "front-a.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s, err := LoadConfig(dir + "server-pair.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(s.Front.Names, []string{f.Name, f.Partner.Name}) || s.TLS.Signers != f.TLS.Signers {
		t.Errorf("the server's file does not fit the load balancers': %+v, %s, %+v", s.Front, f.Name, f.Partner)
	}
	if out, err := exec.Command("bird", "-p", "-c", dir+"bird.conf").CombinedOutput(); err != nil {
		t.Errorf("bird: %v: %s", err, out)
	}
	// Its interfaces are not here: that is all it may find fault with.
	out, err := exec.Command("keepalived", "--config-test", "--use-file="+dir+"keepalived.conf").CombinedOutput()
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if line != "" && !strings.Contains(line, "doesn't exist") && !strings.Contains(line, "Non-existent interface") {
			t.Errorf("keepalived: %v: %s", err, line)
		}
	}
}

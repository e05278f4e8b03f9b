// SPDX-License-Identifier: Apache-2.0

package server

import (
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

// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// TestTellsOfUnserved: doctor and status report a binding without a socket, until one is registered.
func TestTellsOfUnserved(t *testing.T) {
	nstest.NeedRoot(t)
	w := newDispatchWorld(t)
	w.bind("www tcp 127.20.0.0/16 80")
	w.bind("www tcp 127.21.0.0/16 80")
	found := func() string {
		t.Helper()
		findings, err := examine(t.Context(), w.root)
		if err != nil {
			t.Fatal(err)
		}
		var texts []string
		for _, f := range findings {
			texts = append(texts, f.Object+": "+f.Text+": "+f.Remedy)
		}
		return strings.Join(texts, "\n")
	}
	if got := found(); !strings.HasPrefix(got, "www: no socket is registered in net:[") || !strings.Contains(got, "its 2 bindings: the traffic is rejected (0 so far): weir steer register www") {
		t.Errorf("without a socket: %q", got)
	}
	s := startSink(t, "tcp4=127.0.0.1:8080")
	w.register("www", s, "tcp 127.0.0.1:8080")
	if got := found(); got != "" {
		t.Errorf("with one: %q", got)
	}
	s.kill()
	if got := found(); !strings.HasPrefix(got, "www: no socket") {
		t.Errorf("closed: %q", got)
	}
}

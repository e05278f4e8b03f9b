// SPDX-License-Identifier: Apache-2.0

package control

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestSweep checks that only old sockets of killed agents are removed. Sockets of running or
// starting agents and all other files stay.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	old := time.Now().Add(-2 * staleAfter)
	socket := func(name string, listens bool, at time.Time) {
		t.Helper()
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		if listens {
			t.Cleanup(func() { l.Close() })
		} else {
			l.Close()
		}
		if err := os.Chtimes(filepath.Join(dir, name), at, at); err != nil {
			t.Fatal(err)
		}
	}
	socket("backend-4026532224.sock", false, old)
	socket("lb-4026532224-main-lb.sock", false, old)
	socket("backend-4026532225.sock", true, old)
	socket("backend-4026532226.sock", false, time.Now())
	socket("backend-4026532228.sock", false, time.Now())
	socket("handoff.sock", false, old)
	socket("weir-2.sock", false, old)
	file := filepath.Join(dir, "lb-4026532227-a.sock")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(file, old, old); err != nil {
		t.Fatal(err)
	}
	clearSocket(filepath.Join(dir, "lb-4026532227-a.sock"))    // a file
	clearSocket(filepath.Join(dir, "backend-4026532225.sock")) // of a running agent
	clearSocket(filepath.Join(dir, "backend-4026532228.sock")) // of an agent just killed, with its backend removed
	sweep(dir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	want := []string{"backend-4026532225.sock", "backend-4026532226.sock", "handoff.sock", "lb-4026532227-a.sock", "weir-2.sock"}
	if !slices.Equal(names, want) {
		t.Errorf("left: %q, want %q", names, want)
	}
}

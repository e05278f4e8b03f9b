// SPDX-License-Identifier: Apache-2.0

package pidfd

import (
	"fmt"
	"testing"
)

// FuzzParseStat checks that no process name imitates a parent or a start time. The name is the only
// part of the line chosen by a process.
func FuzzParseStat(f *testing.F) {
	f.Add("nfacctd: Core Pr", 7, uint64(123456))
	f.Add("a) R 1 (b", 1, uint64(0))
	f.Add(") S 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 99 (", 0, uint64(1<<64-1))
	f.Add("\n\x00\xff)", -1, uint64(5))
	f.Fuzz(func(t *testing.T, name string, parent int, start uint64) {
		tail := fmt.Sprintf(" S %d 4711 4711 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 5 0 %d 1000 200\n", parent, start)
		got, err := parseStat("4711 (" + name + ")" + tail)
		if err != nil || got.Comm != name || got.State != 'S' || got.PPID != parent || got.StartTime != start {
			t.Errorf("name %q, parent %d, start %d: %+v, %v", name, parent, start, got, err)
		}
		_, _ = parseStat(name) // as a whole line: no panic
	})
}

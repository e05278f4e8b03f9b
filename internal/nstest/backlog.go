// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// Backlogs are the queues of packets waiting for a CPU, of the whole host. On a busy CPU, packets
// over lo, veth and tunnels are handled late or dropped.
type Backlogs struct {
	Waiting uint64 // packets
	Dropped uint64 // packets dropped for lack of room since boot
}

// Backlog reads /proc/net/softnet_stat. Each of its lines is a CPU (net/core/net-procfs.c,
// softnet_seq_show).
func Backlog(t testing.TB) (b Backlogs) {
	t.Helper()
	text, err := os.ReadFile("/proc/net/softnet_stat")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		for at, sum := range map[int]*uint64{1: &b.Dropped, 11: &b.Waiting} {
			if at >= len(words) {
				t.Fatalf("/proc/net/softnet_stat: no word %d in %q", at, line)
			}
			n, err := strconv.ParseUint(words[at], 16, 64)
			if err != nil {
				t.Fatalf("/proc/net/softnet_stat: %v", err)
			}
			*sum += n
		}
	}
	return b
}

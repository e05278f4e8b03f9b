// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// Backlogs are the queues of packets that wait for a CPU, of the whole host: where a CPU is short, packets over lo, veth and
// tunnels are handled after they were sent, or dropped.
type Backlogs struct {
	Waiting uint64 // packets
	Dropped uint64 // packets, since the host's start, for want of room
}

// Backlog reads them: /proc/net/softnet_stat, of which each line is a CPU (net/core/net-procfs.c, softnet_seq_show).
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

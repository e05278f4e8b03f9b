// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// The picture fits 80 columns with the largest numbers of a full run, and leaves room for the log below.
func TestDraw(t *testing.T) {
	now := time.Now()
	before := snapshot{at: now.Add(-time.Second)}
	s := snapshot{at: now, devices: 512, up: 512, datagrams: 20000, messages: 20000, restarts: 40, of: 40, misdirected: 1000, others: 1000,
		rejected: 100000, control: true, fast: fastView{services: 6, devices: 288, up: 288, restarts: 162, of: 162, misdirected: 1000, others: 1000}}
	for range 4 {
		s.slots = append(s.slots, slotView{state: "starting: rejecting", pid: 4194304, devices: 256, sessions: 256, ipfix: 100000, bmp: 100000})
	}
	lines := s.draw(before)
	if len(lines) > 16 {
		t.Errorf("%d lines are too many for a terminal of 24", len(lines))
	}
	for _, l := range lines {
		if n := utf8.RuneCountInString(l); n > 80 {
			t.Errorf("%d columns: %s", n, l)
		}
	}
	picture := strings.Join(lines, "\n")
	for _, want := range []string{"512 routers", "40 of 40 restarts", "6 services, 288 of 288 routers up, 162 of 162 restarts", "pid 4194304"} {
		if !strings.Contains(picture, want) {
			t.Errorf("%q is missing:\n%s", want, picture)
		}
	}
}

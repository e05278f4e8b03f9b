// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestPatienceBeyondHold checks an agent with a timeout above its load balancer's buffer time. It reports the
// position of the key, and uses a shorter timeout.
func TestPatienceBeyondHold(t *testing.T) {
	w := newNetwork(t, 1, at4)
	cert, key, signers := w.ca.Files("lb")
	play := func(hold time.Duration) (stop func()) {
		return w.play(w.middle, "lb", fmt.Sprintf(`
listen: 0.0.0.0:7946
tls: {certificate: %s, key: %s, ca: %s}
devices: [c, s1]
register: true
buffer_timeout: %s
services:
  talk: {number: 3, listen: [tcp %s]}
`, cert, key, signers, hold, w.at))
	}
	s := w.servers[0]
	s.keep()
	stop := play(patience) // equal to the backend's
	w.playBackend(0, s)
	w.eventually("the server says that its patience is too long", func() bool {
		st := s.status()
		return strings.Contains(st.TimeoutError, fmt.Sprintf("server.yaml:10:10: timeout %s of handoff.backend: the load balancer buffers packets", patience)) &&
			strings.Contains(st.TimeoutError, fmt.Sprintf("until then %s is used", patience*7/10))
	})
	stop()
	play(patience + time.Second)
	w.eventually("the server has less patience than the new load balancer's hold", func() bool {
		st := s.status()
		return st.LB && st.TimeoutError == ""
	})
}

func TestPatience(t *testing.T) {
	a := &Agent{o: Options{Timeout: 700 * time.Millisecond}}
	for hold, want := range map[time.Duration]time.Duration{0: 700, time.Second: 700, 700 * time.Millisecond: 490, 100 * time.Millisecond: 70} {
		a.bufferTime.Store(int64(hold))
		if got := a.timeout(); got != want*time.Millisecond {
			t.Errorf("hold %s: %s, want %s", hold, got, want*time.Millisecond)
		}
		if err := a.tooPatient(); (err != nil) != (want < 700) {
			t.Errorf("hold %s: %v", hold, err)
		}
	}
}

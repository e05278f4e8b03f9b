// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/keeper"
)

// SIGKILL at any moment of a stream, many times: the next process of the name goes on,
// and the client sees a stream without a gap or a repetition.
func TestSIGKILL(t *testing.T) {
	kills := 200
	if testing.Short() {
		kills = 30
	}
	w := newWorld(t, keeper.Options{})
	m := w.member("0", 0)
	clients := []*client{w.client(), w.client()}
	for _, c := range clients {
		c.run()
	}
	eventually(t, "both sessions are kept", func() bool { return len(w.sessions("session")) == 2 })
	for range kills {
		time.Sleep(time.Duration(rand.IntN(20_000)) * time.Microsecond)
		m.Kill()
		m = w.member("0", 0)
	}
	for _, c := range clients {
		c.finish()
	}
	n := w.counts()
	t.Logf("%d messages in %d sessions over %d kills; %+v", clients[0].count+clients[1].count, len(clients), kills, n)
	if n.Rescued < uint64(2*kills)*9/10 || n.Gaps+n.Expired+n.Closed != 0 {
		t.Errorf("%d kills: %+v", kills, n)
	}
}

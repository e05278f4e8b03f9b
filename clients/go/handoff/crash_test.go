// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// TestSIGKILL kills a member at random moments of a stream, many times. The next process of the
// name continues, and the client sees no gap and no repetition. It also uses states too large for a
// message. The keeper may have to read many of these after their sender's death.
func TestSIGKILL(t *testing.T) {
	for _, padding := range []int{0, 100_000} {
		t.Run(fmt.Sprint(padding), func(t *testing.T) { killAgain(t, padding) })
	}
}

func killAgain(t *testing.T, padding int) {
	kills := 200
	if testing.Short() {
		kills = 30
	}
	w := newWorld(t, keeper.Options{})
	m := w.member("0", padding)
	clients := []*client{w.client(), w.client()}
	for _, c := range clients {
		c.run()
	}
	nstest.Until(t, "both sessions are kept", func() bool { return len(w.sessions("session")) == 2 })
	for range kills {
		time.Sleep(time.Duration(rand.IntN(20_000)) * time.Microsecond)
		m.Kill()
		m = w.member("0", padding)
	}
	for _, c := range clients {
		c.finish()
	}
	n := w.counts()
	t.Logf("%d messages in %d sessions over %d kills; %+v", clients[0].count.Load()+clients[1].count.Load(), len(clients), kills, n)
	if n.Rescued < uint64(2*kills)*9/10 || n.Gaps+n.Expired+n.Closed != 0 {
		t.Errorf("%d kills: %+v", kills, n)
	}
}

// TestUnprivileged runs a keeper and members of one user without privileges.
func TestUnprivileged(t *testing.T) {
	nstest.NeedRoot(t)
	dir := t.TempDir()
	chmodUp(t, dir)
	if err := os.Chown(dir, 1001, 1001); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, socket: filepath.Join(dir, "keeper.sock"), address: freeAddress(t)}
	start := func(role string, args ...any) *nstest.Process {
		c := nstest.Child(role, args...)
		c.Dir = "/"
		c.SysProcAttr.Credential = &syscall.Credential{Uid: 1001, Gid: 1001}
		return nstest.StartReady(t, c)
	}
	start("keeper", w.socket)
	m := start("member", w.socket, "talk", "0", w.address, 0)
	cs := []*client{w.client(), w.client()}
	for _, c := range cs {
		c.run()
	}
	for range 10 {
		cs[0].hears(20)
		m.Kill()
		m = start("member", w.socket, "talk", "0", w.address, 0)
	}
	for _, c := range cs {
		c.finish()
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// TestUsersAreApart starts a member with the name of another user's member and every capability. It
// gets none of that member's sessions and listeners, neither by a request nor after its death, and
// cannot end it. Root may send sessions there, and a process of the same user gets them.
func TestUsersAreApart(t *testing.T) {
	rules := keeper.Rules{{Service: "talk", Kind: "uid", Value: "1001"}, {Service: "talk", Kind: "uid", Value: "1002"}}
	w := newWorld(t, keeper.Options{Allow: rules.Allow, Grace: 10 * time.Millisecond})
	chmodUp(t, w.socket[:strings.LastIndex(w.socket, "/")])
	as := func(id uint32, name, address string) *nstest.Process {
		t.Helper()
		c := nstest.Child("member", w.socket, "talk", name, address, "0", "orphans")
		c.Dir = "/"
		c.SysProcAttr.Credential = &syscall.Credential{Uid: id, Gid: id}
		return nstest.StartReady(t, c)
	}
	owner := func() (string, uint32) {
		for _, v := range w.keeper.Report().Services {
			for _, s := range v.Sessions {
				if s.Kind != "session" {
					continue
				}
				for _, m := range v.Members {
					if m.PID == s.PID {
						return s.Member, m.UID
					}
				}
				return s.Member, 0
			}
		}
		return "", 0
	}
	is := func(what string, uid uint32) {
		t.Helper()
		nstest.Until(t, what, func() bool { _, u := owner(); return u == uid })
	}

	victim := as(1001, "2", w.address)
	c := w.client()
	c.run()
	is("the session is the victim's", 1001)
	as(1002, "2", freeAddress(t))
	second := as(1002, "1", freeAddress(t))
	// The owner itself gives it to a name used by a stranger.
	for _, name := range []string{"2", "1"} {
		victim.Tell("move " + name)
		if line, ok := victim.Line(); !ok || !strings.Contains(line, "another user") {
			t.Errorf("the owner gives its session to member %s of another user: %q", name, line)
		}
	}
	if _, uid := owner(); uid != 1001 {
		t.Fatalf("the session went to user %d", uid)
	}
	victim.Kill()
	nstest.Until(t, "the session waits", func() bool { _, uid := owner(); return uid == 0 })
	for end := time.Now().Add(400 * time.Millisecond); time.Now().Before(end); { // four ticks of the keeper
		if _, uid := owner(); uid != 0 {
			t.Fatalf("a member of user %d has the dead member's session", uid)
		}
	}
	as(1001, "2", w.address)
	is("a process of the victim's user continues the session", 1001)

	// Root may send it to another user's member, because steering moves devices between slots. Then
	// it belongs to that user.
	nstest.Until(t, "root sends the session to another user's member", func() bool {
		err := handoff.Send(t.Context(), w.socket, "talk", "2", 0, "1")
		if err != nil && !errors.Is(err, handoff.ErrNoPeer) {
			t.Fatal(err)
		}
		_, uid := owner()
		return uid == 1002
	})
	second.Kill()
	is("another member of its new user continues the session", 1002)
	c.finish()
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/internal/nstest"
)

// Errors of the handoff section name the key and its position.
func TestHandoffConfigErrors(t *testing.T) {
	for text, want := range map[string]string{
		"hold: -1s":                            "handoff.keeper.hold: -1s: want a time",
		"hold: 48h":                            "handoff.keeper.hold: 48h0m0s: want a time",
		"hold: 500ms":                          "handoff.keeper.grace: 1s is longer than hold, 500ms",
		"grace: 1m":                            "handoff.keeper.grace: 1m0s is longer than hold, 30s",
		"max_sessions: -1":                     "handoff.keeper.max_sessions: -1: want a number",
		"max_state: 1TiB":                      `"1TiB": want a number of bytes`,
		"max_state: 512MiB":                    "handoff.keeper.max_state: 512MiB: want at most 256MiB",
		"max_state: 2MiB\n    max_total: 1MiB": "handoff.keeper.max_state: 2MiB for one session is more than max_total, 1MiB",
		"max_total: 65GiB":                     "handoff.keeper.max_total: 65GiB: want at most 64GiB",
		"hlod: 1s":                             "hold",
		"hold: 30":                             "handoff.keeper.hold",
		"allow: [dns]":                         `"dns": want SERVICE:KIND=VALUE`,
		"allow: [dns:name=x]":                  "want uid, gid, user",
		"allow: [dns:pidfile=run/x]":           `handoff.keeper.allow: "dns:pidfile=run/x": use an absolute path`,
	} {
		_, err := ParseConfig("weir.yaml", []byte("handoff:\n  keeper:\n    "+text+"\n"))
		if err == nil || !strings.Contains(err.Error(), want) || !place.MatchString(err.Error()) {
			t.Errorf("%s: %v; want %q with its place", text, err, want)
		}
	}
}

// weir serve uses the limits set by weir apply, and later ones, and the defaults after removal of the section.
func TestHandoffLimits(t *testing.T) {
	w := newWorld(t)
	if did := w.apply(w.config("handoff: {keeper: {hold: 700ms, grace: 100ms, max_sessions: 2, max_state: 64KiB, max_total: 1MiB}}")); len(did) != 1 ||
		did[0] != "create limits of the session keeper: hold 700ms, grace 100ms, max_sessions 2, max_state 64KiB, max_total 1MiB" {
		t.Fatalf("%q", did)
	}
	s := w.serve()
	if did := w.apply(w.config("handoff: {keeper: {hold: 700ms, grace: 100ms, max_sessions: 2, max_state: 64KiB, max_total: 1MiB}}")); len(did) != 0 {
		t.Errorf("applied again it did %q", did)
	}
	join := func() *handoff.Member {
		t.Helper()
		m, err := handoff.Join(t.Context(), handoff.Options{Service: "telemetry", Name: "0", Keeper: s.handoff})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	m := join()
	l, err := m.Listen(t.Context(), "tcp4", "127.0.0.1:4742")
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Ready(); err != nil {
		t.Fatal(err)
	}
	peers := make([]net.Conn, 2)
	sessions := make([]*handoff.Session, 2)
	for i := range peers {
		if peers[i], err = net.Dial("tcp4", "127.0.0.1:4742"); err != nil {
			t.Fatal(err)
		}
		defer peers[i].Close()
		if sessions[i], err = l.AcceptSession(); err != nil {
			t.Fatal(err)
		}
	}
	if err := sessions[0].Commit(make([]byte, 65<<10)); !errors.Is(err, handoff.ErrLimit) {
		t.Errorf("65 KiB of state: %v", err)
	}
	// The listener and one session are two sockets.
	nstest.Until(t, "a third socket is not kept", func() bool { return sessions[0].Kept() && !sessions[1].Kept() })
	begin := time.Now()
	m.Close()
	peers[0].SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := peers[0].Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("without a member the peer hears %v, want a reset", err)
	}
	if d := time.Since(begin); d < 600*time.Millisecond || d > 20*time.Second { // 30 s without the limits
		t.Errorf("reset after %v, want the time of holding", d)
	}
	if did := fmt.Sprint(w.apply(w.config("{}"))); !strings.Contains(did, "remove limits of the session keeper") {
		t.Errorf("without the section it did %q", did)
	}
	nstest.Until(t, "the default limits hold", func() bool {
		m := join()
		defer m.Close()
		l, err := m.Listen(context.Background(), "tcp4", "127.0.0.1:0")
		if err != nil {
			return false
		}
		defer l.Close()
		if m.Ready() != nil {
			return false
		}
		c, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			return false
		}
		defer c.Close()
		s, err := l.AcceptSession()
		return err == nil && s.Commit(make([]byte, 100<<10)) == nil
	})
}

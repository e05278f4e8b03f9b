// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	svc "github.com/weir-project/weir/service"
)

// A member that connects as soon as weir serve listens goes by the limits that are applied: it is told of them once.
func TestLimitsBeforeFirstMember(t *testing.T) {
	nstest.NeedRoot(t)
	r := kernel.OpenRoot(filepath.Join(nstest.BPFFS, t.Name()))
	l, err := r.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err = (Limits{State: 7 << 20}).publish(l); err != nil {
		t.Fatal(err)
	}
	l.Unlock()
	for range 20 {
		path := filepath.Join(t.TempDir(), "keeper.sock")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		s := Feature{}.Socket(r, slog.New(slog.DiscardHandler), func(string) ([]svc.Member, error) { return nil, kernel.ErrNotExist })
		go func() { done <- s.Serve(ctx, path) }()
		var c *wire.Conn
		for c == nil && t.Context().Err() == nil { // without a pause: it is in the queue before the first accept
			c, _ = wire.Dial(t.Context(), path)
		}
		m := mate{t, c}
		m.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: "service", Name: "first"})
		if msg, _ := m.hear(wire.Welcome); msg.Read != 7<<20 {
			t.Errorf("the first member is told of %d bytes", msg.Read)
		}
		c.Close()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if l, err = r.Lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer l.Unlock()
	if err := store.Remove(l, pinnedLimits); err != nil {
		t.Error(err)
	}
}

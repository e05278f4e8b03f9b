// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	svc "github.com/weir-project/weir/service"
)

// TestLimitsBeforeFirstMember checks that a member connecting at once receives the applied limits, once.
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
	first(t, r, nil, 7<<20)
	first(t, r, &feature.Document{Sections: feature.Sections{FeatureName: &Limits{State: 9 << 20}}}, 7<<20)
	if l, err = r.Lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := store.Remove(l, pinnedLimits); err != nil {
		t.Error(err)
	}
	l.Unlock()
	first(t, r, &feature.Document{Sections: feature.Sections{FeatureName: &Limits{State: 9 << 20}}}, 9<<20) // about to be applied
}

// first connects a member as soon as weir serve listens, and compares its state limit. d is the file about to be
// applied; nil: none.
func first(t *testing.T, r *kernel.Root, d *feature.Document, want uint64) {
	t.Helper()
	for range 20 {
		path := filepath.Join(t.TempDir(), "keeper.sock")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		s := Feature{}.Socket(r, slog.New(slog.DiscardHandler), func(string) ([]svc.Member, error) { return nil, kernel.ErrNotExist })
		if d != nil {
			s.(feature.Expectant).Expect(d)
		}
		go func() { done <- s.Serve(ctx, path) }()
		var c *wire.Conn
		for c == nil && t.Context().Err() == nil { // without a pause, to be queued before the first accept
			c, _ = wire.Dial(t.Context(), path)
		}
		m := mate{t, c}
		m.say(&wire.Message{Type: wire.Hello, Seq: 1, Text: "service", Name: "first"})
		if msg, _ := m.hear(wire.Welcome); msg.Read != want {
			t.Errorf("the first member is told of %d bytes, want %d", msg.Read, want)
		}
		c.Close()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

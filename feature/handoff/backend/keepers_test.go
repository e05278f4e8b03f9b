// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// TestKeeperLimitsChange checks that an agent follows its keeper's current limit.
func TestKeeperLimitsChange(t *testing.T) {
	nstest.NeedRoot(t)
	socket := filepath.Join(t.TempDir(), "keeper")
	l, err := keeper.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	k := keeper.New(keeper.Options{MaxState: 1000})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- k.Serve(ctx, l) }()
	p := &keeperClient{a: &Agent{o: Options{Keeper: socket, Log: slog.New(slog.DiscardHandler)}}, service: service, name: "@own", calls: map[uint32]func(error){}}
	ended := make(chan struct{})
	go func() { defer close(ended); p.run(ctx) }()
	for _, want := range []int{1000, 5000, 200} {
		k.Limit(keeper.Limits{State: keeper.Size(want)})
		nstest.Eventually(t, func() error {
			if n := p.maxBytes(); n != want {
				return fmt.Errorf("it takes %d bytes, want %d", n, want)
			}
			return nil
		})
	}
	cancel()
	<-ended
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// A stopped agent accepts connections and answers nothing. A request for its status then fails within askAgent.
func TestStatusOfAStoppedAgent(t *testing.T) {
	nstest.Enter(t)
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	l, err := control.Listen(t.Context(), controlName(ns), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	stopped := http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })}
	go stopped.Serve(l)
	defer stopped.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // for a request that would wait forever
	defer cancel()
	_, err = statusOf(ctx, kernel.ScopeOf(ns))
	if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "is weir serve stopped") {
		t.Fatalf("%v, caller's context: %v", err, ctx.Err())
	}
}

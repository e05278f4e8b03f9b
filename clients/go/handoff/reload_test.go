// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// accepted returns a session of a new connection.
func accepted(t *testing.T, l *handoff.Listener) *handoff.Session {
	t.Helper()
	dial(t, l.Addr())
	s, err := l.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "the session is kept", s.Kept)
	return s
}

// states waits until the keeper has states of these sizes, in bytes.
func (w *world) states(want ...int64) {
	w.t.Helper()
	nstest.Eventually(w.t, func() error {
		got := map[int64]bool{}
		for _, s := range w.sessions("session") {
			got[s.State] = true
		}
		for _, n := range want {
			if !got[n] {
				return fmt.Errorf("states of %v bytes are kept, want %v", got, want)
			}
		}
		return nil
	})
}

// TestLimitsChange changes the limits of a connected member. It may commit more at once. After a
// reduction its next commit fails. States already kept stay and move.
func TestLimitsChange(t *testing.T) {
	w := newWorld(t, keeper.Options{MaxState: 1000})
	l := w.join("0")
	s := accepted(t, l)
	if err := s.Commit(make([]byte, 1001)); !errors.Is(err, handoff.ErrLimit) {
		t.Errorf("over the first limit: %v", err)
	}
	w.keeper.Limit(keeper.Limits{State: 300_000})
	nstest.Eventually(t, func() error { return s.Commit(make([]byte, 200_000)) })
	w.states(200_000)
	w.keeper.Limit(keeper.Limits{State: 150_000})
	size := 200_000
	nstest.Eventually(t, func() error {
		size++ // a size already accepted still fits
		if err := s.Commit(make([]byte, size)); !errors.Is(err, handoff.ErrLimit) || !strings.Contains(err.Error(), "at most 150000") {
			return fmt.Errorf("over the lowered limit: %v", err)
		}
		return nil
	})
	size--
	next := w.join("1")
	if err := l.Member().TransferCommitted(s, "1"); err != nil {
		t.Fatal(err)
	}
	s, err := next.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	if n := len(s.State()); n != size {
		t.Errorf("%d bytes of state have moved, want %d", n, size)
	}
	for _, c := range []struct {
		size int
		fits bool
	}{{size, true}, {size + 1, false}, {150_000, true}, {150_001, false}} {
		if err := s.Commit(make([]byte, c.size)); (err == nil) != c.fits || err != nil && !errors.Is(err, handoff.ErrLimit) {
			t.Errorf("%d bytes: %v", c.size, err)
		}
	}
	w.states(150_000)
	if n := w.counts(); !s.Kept() || n.OverLimit != 0 {
		t.Errorf("kept %v, %+v", s.Kept(), n)
	}
}

// TestLimitsChangeUnderCommits checks that the keeper rejects no commit while the limit changes up
// and down. Each is checked against its own limit. A rejected commit would leave the session
// unprotected.
func TestLimitsChangeUnderCommits(t *testing.T) {
	w := newWorld(t, keeper.Options{MaxState: 20_000})
	var log nstest.Log
	l := w.join("0", func(o *handoff.Options) {
		o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	})
	stop, ended := make(chan struct{}), make(chan error)
	var taken, over atomic.Int64
	const sessions = 4
	for range sessions {
		s := accepted(t, l)
		go func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					ended <- nil
					return
				default:
				}
				err := s.Commit(make([]byte, []int{2000, 15_000}[i%2]+rand.IntN(5000)))
				switch {
				case err == nil:
					taken.Add(1)
				case errors.Is(err, handoff.ErrLimit):
					over.Add(1)
				default:
					ended <- err
					return
				}
			}
		}()
	}
	begin := time.Now()
	for i := 0; i < 400 || (taken.Load() == 0 || over.Load() == 0) && time.Since(begin) < patience; i++ {
		w.keeper.Limit(keeper.Limits{State: keeper.Size([]int{10_000, 20_000}[i%2])})
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
	}
	close(stop)
	for range sessions {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if n := w.counts(); n.OverLimit != 0 || log.String() != "" || taken.Load() == 0 || over.Load() == 0 {
		t.Errorf("%d commits taken, %d over the limit, %+v; the member's log:\n%s", taken.Load(), over.Load(), n, log.String())
	}
}

// TestProbeLimitsChange checks the same for members in C and Python, also for commits before they
// read the change.
func TestProbeLimitsChange(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{MaxState: 1000})
			p := w.probe("0", w.address, command...)
			refused := func(p *probe, order, limit string) {
				t.Helper()
				if got, _ := p.says(patience, order); !strings.Contains(got, "keeps at most "+limit) {
					t.Errorf("%s: %q, want the limit of %s", order, got, limit)
				}
			}
			w.connect(p)
			w.connect(p)
			refused(p, "commit 0 1001", "1000")
			w.keeper.Limit(keeper.Limits{State: 300_000})
			p.want("commit 0 200000", "0") // the commit reads the change, because it needs to know
			p.want("commit 1 16", "0")
			w.states(200_000, 16)
			w.keeper.Limit(keeper.Limits{State: 150_000})
			p.want("commit 1 180000", "0") // in progress
			w.states(200_000, 180_000)
			p.want("accept 0", "0")
			refused(p, "commit 0 200001", "150000")
			p.want("commit 0 200000", "0")
			p.want("commit 1 150000", "0")
			refused(p, "commit 1 150001", "150000")
			p.want("commit 1 150000", "0")
			w.states(200_000, 150_000)
			other := w.probe("1", freeAddress(t), command...)
			p.want("transfer 0 200000 1", "0")
			other.want("accept 30000", "1")
			other.want("commit 0 200000", "0")
			refused(other, "commit 0 200001", "150000")
			other.want("commit 0 149999", "0")
			w.states(149_999, 150_000)
			if n := w.counts(); n.OverLimit != 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"testing"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// talking returns a session of a listener with n bytes read and not committed.
func talking(t *testing.T, l *handoff.Listener, n int) (net.Conn, *handoff.Session) {
	t.Helper()
	p := dial(t, l.Addr())
	s, err := l.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	hears(t, p, s, n)
	return p, s
}

func hears(t *testing.T, p net.Conn, s *handoff.Session, n int) {
	t.Helper()
	if _, err := p.Write(make([]byte, n)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(s, make([]byte, n)); err != nil {
		t.Fatal(err)
	}
}

// TestCommitAfterRefusedTransfer checks that commits are kept after a rejected transfer, with and
// without room in the slot, for the same state and a new one.
func TestCommitAfterRefusedTransfer(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	l := w.join("0")
	p, s := talking(t, l, 5)
	if err := s.Commit([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := l.Member().Transfer(s, "nobody", []byte("x")); !errors.Is(err, handoff.ErrNoPeer) {
		t.Fatalf("a transfer to nobody: %v", err)
	}
	hears(t, p, s, 3000)
	if err := s.CommitExcept(3000, []byte("x")); err != nil {
		t.Fatal(err)
	}
	id := s.ID()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	next := w.join("0")
	if s, err := next.AcceptSession(); err != nil || s.ID() != id || string(s.State()) != "x" {
		t.Fatalf("%v, %v", s, err)
	} else if _, err := io.ReadFull(s, make([]byte, 3000)); err != nil {
		t.Fatal(err)
	}
	if c := w.counts(); c.Gaps != 0 || c.OverLimit != 0 {
		t.Errorf("%+v", c)
	}
}

// TestCloseWhileCommitting checks that a member leaving during commits leaves every session as of
// its last commit. None gets another session's commits in its slot.
func TestCloseWhileCommitting(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	const each = 60
	for i := range 5 {
		l := w.join(fmt.Sprint(i)) // the previous sessions wait for their own name
		var sessions []*handoff.Session
		for range 2 * each {
			_, s := talking(t, l, 5)
			sessions = append(sessions, s)
		}
		for _, s := range sessions[:each] {
			if err := s.Commit([]byte("a")); err != nil {
				t.Fatal(err)
			}
		}
		var all sync.WaitGroup
		all.Go(func() {
			for _, s := range sessions[each:] { // each allocates a slot
				_ = s.Commit([]byte("b"))
			}
		})
		l.Close()
		all.Wait()
	}
	nstest.Until(t, "the keeper has heard all", func() bool { return len(w.sessions("session")) == 5*2*each })
	if c := w.counts(); c.Gaps != 0 {
		t.Errorf("%d sessions were reset: %+v", c.Gaps, c)
	}
}

// TestLiveIsNotInherited checks that an ending keeper leaves only waiting sockets to the next one,
// no sockets of living members.
func TestLiveIsNotInherited(t *testing.T) {
	w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock")}
	var s store
	end := w.keep(keeper.Options{Store: s.put}, nil)
	l := w.join("0")
	_, one := talking(t, l, 5)
	if err := one.Commit([]byte("x")); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "it is kept", func() bool { return len(w.sessions("session")) == 1 })
	end()
	if n := len(s.files); n != 0 {
		t.Errorf("%d descriptors are left to the next keeper", n)
	}
	end = w.keep(keeper.Options{Store: s.put}, s.take())
	defer end()
	nstest.Until(t, "the next keeper has it", func() bool {
		return one.Commit([]byte("y")) == nil && one.Kept() && len(w.sessions("session")) == 1
	})
	l.Close()
}

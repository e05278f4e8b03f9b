// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
)

// TestLimits checks that excess sessions and states are rejected with an error, and the rest
// continues.
func TestLimits(t *testing.T) {
	w := newWorld(t, keeper.Options{MaxSessions: 3, MaxState: 100_000, MaxTotal: 150_000})
	l := w.join("0")
	var sessions []*handoff.Session
	for range 3 {
		dial(t, l.Addr()).Write([]byte("x"))
		s, err := l.AcceptSession()
		if err != nil {
			t.Fatal(err)
		}
		sessions = append(sessions, s)
	}
	nstest.Until(t, "the third session is one too many, beside the listener", func() bool { return !sessions[2].Kept() })
	s := sessions[0]
	if err := s.Commit(make([]byte, 100_001)); !errors.Is(err, handoff.ErrLimit) {
		t.Errorf("a state over the limit: %v", err)
	}
	if err := s.Commit(make([]byte, 100_000)); err != nil {
		t.Errorf("a state at the limit: %v", err)
	}
	if err := sessions[1].Commit(make([]byte, 60_000)); err != nil {
		t.Error(err)
	}
	nstest.Until(t, "the second state is too much", func() bool { return !sessions[1].Kept() && s.Kept() })
	if err := s.Commit(nil); err != nil {
		t.Error(err)
	}
	nstest.Until(t, "there is room for the second state", func() bool {
		if err := sessions[1].Commit(make([]byte, 60_001)); err != nil { // after a rejection a retry is delayed
			t.Fatal(err)
		}
		for _, x := range w.sessions("session") {
			if x.State == 60_001 {
				return sessions[1].Kept()
			}
		}
		return false
	})
	if n := w.counts(); n.OverLimit < 2 {
		t.Errorf("%+v", n)
	}
}

// TestWindow checks that reads beyond the window without a commit fail. Up to the window they
// succeed, even far beyond the size of the socket's buffer.
func TestWindow(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	l := w.join("0", func(o *handoff.Options) { o.Window = 700_000 })
	peer := dial(t, l.Addr())
	go peer.Write(make([]byte, 800_000))
	s, err := l.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	s.SetReadDeadline(time.Now().Add(patience))
	n, b := 0, make([]byte, 30_000)
	for err == nil {
		var got int
		got, err = s.Read(b)
		n += got
	}
	if n != 700_000 || !errors.Is(err, handoff.ErrUncommitted) {
		t.Fatalf("read %d bytes, %v; want 700000 and ErrUncommitted", n, err)
	}
	if err := s.Commit(nil); err != nil {
		t.Fatal(err)
	}
	for n < 800_000 {
		got, err := s.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		n += got
		if err := s.Commit(nil); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSlowMember checks that a stopped member gets no more sessions once detected, and delays
// nobody else.
func TestSlowMember(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	slow := w.memberAt(freeAddress(t), "slow", 0)
	l := w.join("a")
	accept := func() *handoff.Session {
		dial(t, l.Addr())
		s, err := l.AcceptSession()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first, s2 := []*handoff.Session{accept(), accept(), accept()}, accept()
	stop(t, slow)
	var took []time.Duration
	for _, s := range first {
		start := time.Now()
		err := l.Transfer(s, "slow", nil)
		if errors.Is(err, handoff.ErrSlow) && len(took) > 0 {
			break // the machine stalled, and the keeper has noticed already
		}
		if err != nil {
			t.Fatal(err)
		}
		took = append(took, time.Since(start))
	}
	if slices.Min(took) > time.Second { // a single one may hit a stall of the machine
		t.Errorf("transfers to a stopped member took %v", took)
	}
	time.Sleep(2200 * time.Millisecond)
	if err := l.Transfer(s2, "slow", nil); !errors.Is(err, handoff.ErrSlow) {
		t.Errorf("to a member without an answer: %v", err)
	}
	slow.Signal(syscall.SIGCONT)
	nstest.Until(t, "it answers", func() bool { return l.Transfer(s2, "slow", nil) == nil })
}

// TestManySessions moves five thousand sessions of a killed member to the next one.
func TestManySessions(t *testing.T) {
	const sessions = 5000
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil || limit.Max < 2*sessions+100 {
		t.Fatalf("the limit of descriptors is %d, %v: raise it (ulimit -Hn)", limit.Max, err)
	}
	w := newWorld(t, keeper.Options{})
	m := w.member("0", 0)
	conns := make([]net.Conn, sessions)
	ask := func(i int) error {
		conns[i].SetDeadline(time.Now().Add(patience))
		k := newTalk(nil)
		k.next([]byte("1234567"))
		_, err := conns[i].Write([]byte("1234567"))
		b := make([]byte, answer)
		if err == nil {
			_, err = io.ReadFull(conns[i], b)
		}
		return err
	}
	for i := range conns {
		conns[i] = dial(t, tcpAddr(t, w.address))
		if err := ask(i); err != nil {
			t.Fatal(err)
		}
	}
	m.Kill()
	start := time.Now()
	m = w.member("0", 0)
	ready := time.Since(start)
	for i := range conns {
		if err := ask(i); err != nil {
			t.Fatalf("session %d: %v", i, err)
		}
	}
	t.Logf("the replacement was ready after %v, all sessions had answered after %v; %+v", ready, time.Since(start), w.counts())
	if n := w.counts(); n.Rescued != sessions {
		t.Errorf("%d sessions were rescued, want %d", n.Rescued, sessions)
	}
	// Also by an orderly restart.
	start = time.Now()
	next := w.member("0", 0)
	m.Expect("stopped: true")
	nstest.Until(t, "all have moved", func() bool { return w.counts().Transfers == sessions })
	t.Logf("hot restart with all sessions: %v", time.Since(start))
	for i := range conns {
		if err := ask(i); err != nil {
			t.Fatalf("session %d: %v", i, err)
		}
	}
	next.Kill()
}

// stop stops a process and waits for its state T.
func stop(t testing.TB, p *nstest.Process) {
	t.Helper()
	p.Signal(syscall.SIGSTOP)
	nstest.Until(t, "the process is stopped", func() bool {
		proc, err := pidfd.Open(p.PID())
		if err != nil {
			t.Fatal(err)
		}
		defer proc.Close()
		info, err := proc.Info()
		return err == nil && info.State == 'T'
	})
}

// TestDescriptors checks that a keeper without free descriptors rejects only the excess sockets.
// Connected members stay, and others can connect.
func TestDescriptors(t *testing.T) {
	nstest.NeedRoot(t)
	w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
	k := nstest.StartReady(t, nstest.Child("keeper", w.socket))
	var was unix.Rlimit
	if err := unix.Prlimit(k.Process.Pid, unix.RLIMIT_NOFILE, nil, &was); err != nil {
		t.Fatal(err)
	}
	limit := func(n int) {
		t.Helper()
		if err := unix.Prlimit(k.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(n), Max: was.Max}, nil); err != nil {
			t.Fatal(err)
		}
	}
	has := func() int {
		t.Helper()
		d, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", k.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(d)
	}
	limit(64)
	var log nstest.Log
	l := w.join("0", func(o *handoff.Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	var sessions []*handoff.Session
	more := func(n int) {
		t.Helper()
		for range n {
			dial(t, l.Addr())
			s, err := l.AcceptSession()
			if err != nil {
				t.Fatal(err)
			}
			sessions = append(sessions, s)
		}
	}
	kept := func() (n int) {
		for _, s := range sessions {
			if s.Kept() {
				n++
			}
		}
		return n
	}
	same := func(want int) {
		t.Helper()
		r, err := handoff.Status(t.Context(), w.socket) // by another connection
		if err != nil || len(r.Services) != 1 || len(r.Services[0].Members) != 1 {
			t.Fatalf("%+v, %v", r, err)
		}
		if v := r.Services[0]; len(v.Sessions) != want+1 || v.Counts.Kept != uint64(want+1) || kept() != want { // with the listener, each once
			t.Errorf("%d are kept by the keeper, counted %d, %d as the member knows; want %d", len(v.Sessions)-1, v.Counts.Kept-1, kept(), want)
		}
	}
	more(70)
	nstest.Until(t, "some are too many", func() bool { return !sessions[69].Kept() })
	all := kept()
	if all < 30 || all > 56 || has() > 62 {
		t.Errorf("%d sessions are kept with %d descriptors of 64", all, has())
	}
	same(all)
	limit(has()) // not even one to receive
	more(1)
	nstest.Until(t, "one more is too many", func() bool { return !sessions[70].Kept() })
	limit(64)
	same(all)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(log.String(), "RLIMIT_NOFILE") || strings.Contains(log.String(), "keeper gone") {
		t.Errorf("the member's log:\n%s", log.String())
	}
}

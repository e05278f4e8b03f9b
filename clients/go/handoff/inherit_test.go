// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// keep serves a keeper that inherits left. end stops it in an orderly way.
func (w *world) keep(o keeper.Options, left []*os.File) (end func()) {
	w.t.Helper()
	w.keeper = keeper.New(o)
	if err := w.keeper.Inherit(left); err != nil {
		w.t.Error(err)
	}
	l, err := keeper.Listen(w.socket)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.keeper.Serve(ctx, l) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	}
}

// store receives the waiting sockets of ending keepers.
type store struct{ files []*os.File }

func (s *store) put(fds []int) error {
	for _, fd := range fds {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		s.files = append(s.files, os.NewFile(uintptr(dup), "weir-handoff"))
	}
	return nil
}

func (s *store) take() []*os.File {
	out := s.files
	s.files = nil
	return out
}

// TestKeepersInherit ends one keeper after the other while sessions wait for their killed member.
// The member's replacement continues with the exact streams, also with a state too large for a
// message.
func TestKeepersInherit(t *testing.T) {
	nstest.NeedRoot(t)
	w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
	var s store
	o := keeper.Options{Store: s.put, Log: slog.New(slog.NewTextHandler(testWriter{t}, nil))}
	end := w.keep(o, nil)
	m := w.member("0", 100_000)
	clients := []*client{w.client(), w.client()}
	for _, c := range clients {
		c.run()
	}
	nstest.Until(t, "both sessions are kept", func() bool { return len(w.sessions("session")) == 2 })
	for range 5 {
		clients[0].hears(20)
		m.Kill()
		nstest.Until(t, "all wait", func() bool {
			n := 0
			for _, x := range append(w.sessions("session"), w.sessions("listener")...) {
				if x.PID == 0 {
					n++
				}
			}
			return n == 3
		})
		end()
		if len(s.files) != 4 {
			t.Fatalf("%d descriptors were left, want a list, two sessions and a listener", len(s.files))
		}
		end = w.keep(o, s.take())
		m = w.member("0", 100_000)
	}
	for _, c := range clients {
		c.finish()
	}
	m.Kill()
	end()
	for _, f := range s.take() {
		f.Close()
	}
}

// TestInheritRefuses checks that unusable sessions are reset with an error naming the reason.
func TestInheritRefuses(t *testing.T) {
	nstest.NeedRoot(t)
	for what, x := range map[string]struct {
		spoil func(files []*os.File) []*os.File
		want  string
	}{
		"no list":    {func(f []*os.File) []*os.File { f[0].Close(); return f[1:] }, "no record describes"},
		"no sockets": {func(f []*os.File) []*os.File { f[1].Close(); f[2].Close(); return f[:1] }, "its socket is missing"},
		"version": {func(f []*os.File) []*os.File {
			f[0].WriteAt([]byte(`{"version":9`), 0)
			return f
		}, "version 9"},
		"no JSON": {func(f []*os.File) []*os.File { f[0].WriteAt([]byte("x"), 0); return f }, "list of waiting sessions"},
		"read behind its back": {func(f []*os.File) []*os.File {
			for _, s := range f[1:] {
				raw, _ := s.SyscallConn()
				raw.Control(func(fd uintptr) { unix.Read(int(fd), make([]byte, 3)) })
			}
			return f
		}, "not committed"},
	} {
		t.Run(strings.ReplaceAll(what, " ", "_"), func(t *testing.T) {
			w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
			var left store
			end := w.keep(keeper.Options{Store: left.put}, nil)
			l := w.join("0")
			peer := dial(t, l.Addr())
			s, err := l.AcceptSession()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := peer.Write([]byte("hello")); err != nil {
				t.Fatal(err)
			}
			// It has arrived: Read leaves the bytes in the socket.
			if n, err := s.Read(make([]byte, 5)); err != nil || n != 5 {
				t.Fatal(n, err)
			}
			l.Close()
			nstest.Until(t, "the session waits", func() bool { x := w.sessions("session"); return len(x) == 1 && x[0].PID == 0 })
			end()
			if len(left.files) != 3 {
				t.Fatalf("%d descriptors were left", len(left.files))
			}
			err = keeper.New(keeper.Options{}).Inherit(x.spoil(left.take()))
			if err == nil || !strings.Contains(err.Error(), x.want) {
				t.Errorf("%v; want %q", err, x.want)
			}
			if _, err := peer.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) && what != "no sockets" {
				t.Errorf("the peer gets %v, want a reset", err)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// playEcho echoes 16 bytes and gives the session back, repeatedly.
func playEcho(args []string) error {
	l, err := handoff.Listen(context.Background(), "tcp", "127.0.0.1:0", handoff.Options{Service: "talk", Name: "b", Keeper: args[0]})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	go func() { io.Copy(io.Discard, os.Stdin); os.Exit(0) }()
	b := make([]byte, 16)
	for {
		s, err := l.AcceptSession()
		if err != nil {
			return err
		}
		if _, err := io.ReadFull(s, b); err != nil {
			continue
		}
		s.Write(b)
		if err := l.Transfer(s, "a", s.State()); err != nil {
			return err
		}
	}
}

// BenchmarkMove moves a session from this process through the keeper to an echo process. That
// answers 16 bytes of the peer and moves the session back. An op is both moves and the answer. The
// one-way metric is half an op.
func BenchmarkMove(b *testing.B) {
	nstest.NeedRoot(b)
	for _, size := range []int{200, 60_000} {
		b.Run(fmt.Sprint("state=", size), func(b *testing.B) {
			w := &world{t: b, socket: b.TempDir() + "/keeper.sock"}
			nstest.StartReady(b, nstest.Child("keeper", w.socket))
			nstest.StartReady(b, nstest.Child("echo", w.socket))
			l := w.join("a")
			peer := dial(b, l.Addr())
			peer.SetDeadline(time.Time{})
			s, err := l.AcceptSession()
			if err != nil {
				b.Fatal(err)
			}
			state := make([]byte, size)
			if err := s.Commit(state); err != nil {
				b.Fatal(err)
			}
			buf := make([]byte, 16)
			var took []time.Duration
			for b.Loop() {
				peer.Write(buf)
				start := time.Now()
				if err := l.Transfer(s, "b", state); err != nil {
					b.Fatal(err)
				}
				if s, err = l.AcceptSession(); err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(start)/2)
				if _, err := io.ReadFull(peer, buf); err != nil {
					b.Fatal(err)
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-µs/one-way")
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-µs/one-way")
		})
	}
}

// BenchmarkCommit measures a commit in the application: a state of 100 bytes, with 100 bytes read.
func BenchmarkCommit(b *testing.B) {
	nstest.NeedRoot(b)
	w := newWorld(b, keeper.Options{})
	l := w.join("a")
	peer := dial(b, l.Addr())
	peer.SetDeadline(time.Time{})
	go func() {
		for {
			if _, err := peer.Write(make([]byte, 64<<10)); err != nil {
				return
			}
		}
	}()
	s, err := l.AcceptSession()
	if err != nil {
		b.Fatal(err)
	}
	buf, state := make([]byte, 100), make([]byte, 100)
	for b.Loop() {
		if _, err := s.Read(buf); err != nil {
			b.Fatal(err)
		}
		state[0]++
		if err := s.Commit(state); err != nil {
			b.Fatal(err)
		}
	}
}

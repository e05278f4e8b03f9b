// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
)

// TestWorkers checks that blocked work does not delay later work, and that few idle goroutines remain.
func TestWorkers(t *testing.T) {
	before := runtime.NumGoroutine()
	done := make(chan struct{})
	w := newWorkers(done)
	for range 3 {
		const jobs = 10 * maxWaiting
		var all, begun sync.WaitGroup
		block := make(chan struct{})
		begun.Add(jobs)
		for range jobs {
			all.Add(1)
			w.run(func() {
				defer all.Done()
				begun.Done()
				<-block
			})
		}
		begun.Wait() // all run concurrently
		close(block)
		all.Wait()
		goroutines(t, before+maxWaiting)
	}
	close(done)
	goroutines(t, before)
}

// TestHear checks that every frame is processed, alone or in a burst, independent of earlier ones. hear returns
// when the connection has ended.
func TestHear(t *testing.T) {
	ca := peertest.NewAuthority(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialed := make(chan *peer.Conn, 1)
	go func() {
		c, err := peer.Dial(t.Context(), l.Addr().String(), "lb", ca.TLS("host-a"), peer.Hello{Number: 3, Name: "host-a"})
		if err != nil {
			t.Error(err)
		}
		dialed <- c
	}()
	raw, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	in, err := peer.Accept(t.Context(), raw, ca.TLS("lb"), peer.Hello{Role: peer.LBAgent, Name: "lb"})
	if err != nil {
		t.Fatal(err)
	}
	out := <-dialed
	const frames = 200
	dealt, stuck, ended := make(chan move.Epoch, frames), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		newWorkers(t.Context().Done()).hear(in, func(f peer.Frame) {
			if f.Message.Epoch%10 == 0 {
				<-stuck // until all frames are received
			}
			dealt <- f.Message.Epoch
		})
	}()
	for i := range move.Epoch(frames) {
		if err := out.Send(peer.Frame{Message: move.Message{Kind: move.Done, Epoch: i}}); err != nil {
			t.Fatal(err)
		}
		if i < frames/2 {
			time.Sleep(100 * time.Microsecond) // single frames; the rest in a burst
		}
	}
	seen := map[move.Epoch]bool{}
	for len(seen) < frames {
		select {
		case e := <-dealt:
			if seen[e] {
				t.Fatalf("frame %d was dealt with twice", e)
			}
			seen[e] = true
			if len(seen) == frames-frames/10 {
				close(stuck)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("%d frames of %d", len(seen), frames)
		}
	}
	out.Close()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Fatal("hear does not see that the connection has ended")
	}
}

// goroutines waits until at most that many exist.
func goroutines(t *testing.T, most int) {
	t.Helper()
	nstest.Eventually(t, func() error {
		if runtime.NumGoroutine() > most {
			return fmt.Errorf("%d goroutines, and at most %d should be left", runtime.NumGoroutine(), most)
		}
		return nil
	})
}

// BenchmarkWorkers reuses an idle worker.
func BenchmarkWorkers(b *testing.B) {
	w := newWorkers(b.Context().Done())
	var grow func(n int) int
	grow = func(n int) int { // uses about 30 KiB of stack
		var a [64]int
		if n == 0 {
			return a[n]
		}
		return grow(n-1) + a[n%64]
	}
	for _, how := range []string{"workers", "go"} {
		b.Run(how, func(b *testing.B) {
			did := make(chan int)
			for b.Loop() {
				f := func() { did <- grow(50) }
				if how == "go" {
					go f()
				} else {
					w.run(f)
				}
				<-did
			}
		})
	}
}
